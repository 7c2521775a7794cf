// Scales of `sm80_w8a16` that change every 32 or 64 of K: a stage has those of its tile.
//
//   weights    thread t copies four neighbours                         slot of 16 bytes
//   [N, K]     column t, its blocks along K (two of 64)                t % 4 * 32 + t / 4
//   [K, N]     block t / 32, columns 4q ... 4q + 3, where q = t % 32   t / 32 * 32 + q
//
// Once they have arrived, each thread makes four float32 of its own slot. A lane then finds the
// scales of its four columns in four slots, 32 slots apart, or in one for each block. Either way
// the slots of a warp are neighbours, without bank conflicts.
//
//   K of a stage:  | 32 | 32 | 32 | 32 |     two steps of 16 each
//                  acc = the products of two steps           tensor cores
//                  scaled_acc += acc * scale
//
// So each sum of 32 is exact in float32 before it is scaled, whatever form its scale has. Runs
// beyond the last block are zeros: no product may be multiplied by what was in memory.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {

// Makes float32 of a slot of stored scales.
__device__ __forceinline__ Vector16 Widened(ScaleForm form, const Vector16& stored) {
  Vector16 wide;
  WithForm(form, [&]<ScaleForm kForm>() {
    constexpr int kBits = 8 * BytesOf(kForm), kPerWord = 32 / kBits;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = stored.words[i / kPerWord] >> i % kPerWord * kBits;
      wide.words[i] = __float_as_uint(ScaleOf(kForm, word & 0xffffffffu >> (32 - kBits)));
    }
  });
  return wide;
}

// Copies the scales of stages. Its address advances from tile to tile along K.
//   kMnMajor  weights are [K, N]; else [N, K]
template <bool kMnMajor>
class FineScaleLoader {
 public:
  __device__ __forceinline__ FineScaleLoader(const Arguments& a, const BlockTile& tile,
                                             int32_t depth_tile)
      : column_(tile.column_tile * kTileColumns +
                (kMnMajor ? 4 * (threadIdx.x % 32) : threadIdx.x)) {
    const int32_t of_thread = kMnMajor ? static_cast<int32_t>(threadIdx.x) / 32 : 0;
    const int32_t block = depth_tile * PerTile(a) + of_thread * PerTile(a) / 4;
    blocks_ = (a.depth + a.fine_depth - 1) / a.fine_depth - block;
    const int64_t at = tile.batch * a.scale_batch + PastScales(a) + block * a.scale_depth +
                       int64_t{Line(a, min(column_, a.columns - 1))} * a.scale_column;
    from_ = static_cast<const uint8_t*>(a.scales) + at * BytesOf(a.scale_form);
  }

  // Starts the copies of a tile to its slots.
  __device__ __forceinline__ void Load(const Arguments& a, uint8_t* slots) const {
    const int32_t all = kMnMajor ? 4 : PerTile(a), columns = a.columns - column_;
    const int32_t count = min(all, kMnMajor ? columns : blocks_);
    const bool any = columns > 0 && blocks_ > 0;
    if (a.fine_runs) {
      CopyRun(a, any ? count : 0, all, SharedAddress(slots + Slot()));
    } else {
      CopyEach(a, any ? count : 0, slots + Slot());
    }
  }

  // Goes to the next tile of the rank along K.
  __device__ __forceinline__ void Advance(const Arguments& a) {
    const int32_t blocks = PerTile(a) * a.schedule.split;
    blocks_ -= blocks;
    from_ += blocks * a.scale_depth * BytesOf(a.scale_form);
  }

  // Makes float32 of the scales that this thread copied, in place.
  __device__ __forceinline__ static void Widen(const Arguments& a, uint8_t* slots) {
    auto* slot = reinterpret_cast<Vector16*>(slots + Slot());
    Vector16 wide = Widened(a.scale_form, *slot);
    if (!kMnMajor && a.fine_depth != kFineDepth) {
      wide = {wide.words[0], wide.words[0], wide.words[1], wide.words[1]};
    }
    *slot = wide;
  }

 private:
  // Blocks along K in a tile.
  __device__ __forceinline__ static int32_t PerTile(const Arguments& a) {
    return a.fine_depth == kFineDepth ? kTileDepth / kFineDepth : kTileDepth / kFineDepth / 2;
  }
  __device__ __forceinline__ static int Slot() {
    const int thread = static_cast<int>(threadIdx.x);
    return 16 * (kMnMajor ? thread : thread % 4 * 32 + thread / 4);
  }
  __device__ __forceinline__ static int32_t Line(const Arguments& a, int32_t column) {
    return a.tile_columns == 1 ? column : column / a.tile_columns;
  }

  // Copies an aligned run of `all`, of which `count` exist.
  __device__ __forceinline__ void CopyRun(const Arguments& a, int32_t count, int32_t all,
                                          uint32_t slot) const {
    const int size = BytesOf(a.scale_form), bytes = size * count;
    if (size * all == 16) {
      CopyAsync16(slot, from_, bytes);
    } else if (size * all == 8) {
      CopyAsync8(slot, from_, bytes);
    } else {
      CopyAsync4(slot, from_, bytes);
    }
  }

  __device__ __forceinline__ void CopyEach(const Arguments& a, int32_t count, uint8_t* slot) const {
    const int size = BytesOf(a.scale_form);
    uint32_t stored[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      const int64_t at = kMnMajor
                             ? int64_t{Line(a, column_ + i) - Line(a, column_)} * a.scale_column
                             : i * a.scale_depth;
      stored[i] = LoadScale(from_ + at * size, a.scale_form, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (size == 4) {
        reinterpret_cast<uint32_t*>(slot)[i] = stored[i];
      } else if (size == 2) {
        reinterpret_cast<uint16_t*>(slot)[i] = static_cast<uint16_t>(stored[i]);
      } else {
        slot[i] = static_cast<uint8_t>(stored[i]);
      }
    }
  }

  int32_t column_, blocks_;  // blocks along K from the next on
  const uint8_t* from_;
};

// Without fine scales.
struct NoScales {
  static constexpr bool kFine = false;
  static constexpr Order kOrder = Order::kRuns;

  __device__ __forceinline__ NoScales(const uint8_t*, int) {}
};

// The scales of a lane's columns in half a stage: two blocks of 32 of K.
template <bool kMnMajor>
struct FineScales {
  static constexpr bool kFine = true;
  static constexpr Order kOrder = Order::kBlocks;
  float values[2][4];

  __device__ __forceinline__ FineScales(const uint8_t* slots, int half) {
    const int quad = ColumnOf(threadIdx.x / 32, threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < (kMnMajor ? 2 : 4); ++i) {
      const uint8_t* slot = slots + 16 * ((kMnMajor ? 2 * half + i : i) * 32 + quad);
      if constexpr (kMnMajor) {
        const float4 columns = *reinterpret_cast<const float4*>(slot);
        values[i][0] = columns.x, values[i][1] = columns.y;
        values[i][2] = columns.z, values[i][3] = columns.w;
      } else {
        const float2 blocks = *reinterpret_cast<const float2*>(slot + 8 * half);
        values[0][i] = blocks.x, values[1][i] = blocks.y;
      }
    }
  }

  // scaled_acc += acc * scales, for one of the two fragments of columns.
  //   factor  the scale's share of the decoding (`Decoder::kFactor`)
  template <int kRowFragments>
  __device__ __forceinline__ void Add(int block, int m, float factor,
                                      const float (&acc)[kRowFragments][4],
                                      float (&scaled_acc)[kRowFragments][4]) const {
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The factor comes first: factor * scale could overflow where the scaled sum does not.
        const float sum = factor == 1.0f ? acc[n][i] : acc[n][i] * factor;
        scaled_acc[n][i] += sum * values[block][2 * m + i / 2];
      }
    }
  }
};

}  // namespace jaxfp8::cuda::w8a16
