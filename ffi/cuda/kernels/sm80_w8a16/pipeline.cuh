// The copies of `sm80_w8a16` from global to shared memory: a ring of stages (`StagesFor`).
//
//   stage     0           1           2           3
//         [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a]    w weights, a activations
//          multiplied   copies in flight .........  refilled once every thread has read it
//
// All threads of the CTA copy and all multiply.

#pragma once

#include <type_traits>

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/fine_scales.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

// Copies one stage of `sm80_w8a16` from global to shared memory: a tile of weights and a tile of
// activations.
//
//                rows of a tile       parts of a row         thread t copies part, of rows
//   weights      128                  8 chunks of 16 bytes   t % 8,   t / 8 + 16 i
//   activations  8 * kRowFragments    16 chunks              t % 16,  t / 16 + 8 i
//
// Depths past K are filled with zeros, because they would reach every accumulator. Columns and rows
// past the end are not copied: their accumulators are never stored.

__device__ __forceinline__ int Clip(int value, int limit) { return max(0, min(value, limit)); }

// Copies `bytes` of 16 bytes without 16-byte alignment, and clears the rest.
__device__ __forceinline__ void CopyNarrow(uint32_t to, const uint8_t* from, int bytes,
                                           int access_bytes) {
  if (access_bytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int available = Clip(bytes - 4 * i, 4);
      CopyAsync4(to + 4 * i, available > 0 ? from + 4 * i : from, available);
    }
    return;
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < bytes) words[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
  }
  StoreShared16(to, words);
}

// Copies `count` of eight activations one by one and clears the rest.
template <typename Activation>
__device__ __forceinline__ void CopyScattered(uint32_t to, const Activation* from, int64_t stride,
                                              int count) {
  constexpr int kBits = 8 * sizeof(Activation), kPerWord = 32 / kBits;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) {
      words[i / kPerWord] |= static_cast<uint32_t>(from[i * stride]) << (kBits * (i % kPerWord));
    }
  }
  StoreShared16(to, words);
}

// Copies `count` of eight aligned activations, and clears the rest.
__device__ __forceinline__ void CopyChunk(uint32_t to, const uint16_t* from, int count) {
  CopyAsync16(to, from, 2 * count);
}
__device__ __forceinline__ void CopyChunk(uint32_t to, const uint8_t* from, int count) {
  CopyAsync8(to, from, count);
}

// The addresses of a thread's copies. They are advanced from tile to tile along K: with few rows,
// computing them anew would cost as much as the arithmetic.
//   kMnMajor       weights are [K, N]; else [N, K]
//   kRowFragments  rows of the tile in units of 8
//   kOrder         of depths: where chunks lie in shared memory
template <DType kActivation, bool kMnMajor, int kRowFragments, Order kOrder>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Arguments& a, const BlockTile& tile, int32_t depth_tile) {
    const int column = tile.column_tile * kTileColumns, row = tile.row;
    const int depth = depth_tile * kTileDepth;
    columns_ = a.columns - column;
    rows_ = tile.end - row;
    depth_ = a.depth - depth;
    weights_ = a.weights + tile.batch * a.weight_batch + PastWeights(a) +
               ((kMnMajor ? depth : column) + WeightRow()) * a.weight_pitch +
               (kMnMajor ? column : depth) + 16 * WeightChunk();
    activations_ = static_cast<const Activation*>(a.activations) + tile.batch * a.activation_batch +
                   (row + ActivationRow()) * a.activation_row +
                   (depth + 8 * ActivationChunk()) * a.activation_depth;
  }

  // Starts the copies of a tile to its place in a stage, `to`.
  __device__ __forceinline__ void LoadWeights(const Arguments& a, uint32_t to,
                                              uint64_t policy) const {
    if (a.weight_access_bytes == 16 && depth_ >= kTileDepth) {
      LoadAllWeights(a, to, policy);
    } else {
      LoadSomeWeights(a, to);
    }
  }
  __device__ __forceinline__ void LoadActivations(const Arguments& a, uint32_t to) const {
    if (a.activations_vectorized && depth_ >= kTileDepth) {
      LoadAllActivations(a, to);
    } else {
      LoadSomeActivations(a, to);
    }
  }

  // Goes to the next tile of the rank along K.
  __device__ __forceinline__ void Advance(const Arguments& a) {
    const int depth = kTileDepth * a.schedule.split;
    depth_ -= depth;
    weights_ += kMnMajor ? depth * a.weight_pitch : depth;
    activations_ += depth * a.activation_depth;
  }

 private:
  using Activation = Bits<kActivation>;
  // A column of [N, K] weights has 128 bytes in a tile. DRAM reads longer runs faster. On an H100
  // with 28672 x 8192 weights, prefetching is 1.05x faster for up to 16 rows, and 0.97x with 64
  // rows.
  static constexpr bool kFetchesAhead = !kMnMajor && kRowFragments <= 2;
  static constexpr int kWeightRowsPerPass = kThreads / kWeightChunks;
  static constexpr int kActivationRowsPerPass = kThreads / kActivationChunks;

  __device__ __forceinline__ static int WeightChunk() { return threadIdx.x % kWeightChunks; }
  __device__ __forceinline__ static int WeightRow() { return threadIdx.x / kWeightChunks; }
  __device__ __forceinline__ static int ActivationChunk() {
    return threadIdx.x % kActivationChunks;
  }
  __device__ __forceinline__ static int ActivationRow() { return threadIdx.x / kActivationChunks; }
  __device__ __forceinline__ static uint32_t WeightOffset(int row) {
    return kMnMajor ? MnMajorOffset<kOrder>(row, WeightChunk())
                    : KContiguousOffset<kOrder>(row, WeightChunk());
  }
  __device__ __forceinline__ static uint32_t ActivationOffset(int row) {
    return kOrder == Order::kWgmma
               ? WgmmaActivationOffset(8 * kRowFragments, row, ActivationChunk())
               : w8a16::ActivationOffset<kOrder>(row, ActivationChunk());
  }
  // Columns of the weights from the thread's first on.
  __device__ __forceinline__ int ColumnsLeft() const {
    return columns_ - (kMnMajor ? 16 * WeightChunk() : WeightRow());
  }

  __device__ __forceinline__ void LoadAllWeights(const Arguments& a, uint32_t to,
                                                 uint64_t policy) const {
    const int left = ColumnsLeft();
    const uint8_t* from = weights_;
#pragma unroll
    for (int row = 0; row < kWeightRows; row += kWeightRowsPerPass) {
      if (left > (kMnMajor ? 0 : row)) {
        const uint32_t at = to + WeightOffset(row + WeightRow());
        if constexpr (kFetchesAhead) {
          CopyAsync16Of256(at, from, policy);
        } else {
          CopyAsync16(at, from, policy);
        }
      }
      from += kWeightRowsPerPass * a.weight_pitch;
    }
  }

  // At the end of K, or without alignment.
  __device__ __forceinline__ void LoadSomeWeights(const Arguments& a, uint32_t to) const {
    const uint8_t* from = weights_;
#pragma unroll 1
    for (int row = 0; row < kWeightRows; row += kWeightRowsPerPass) {
      const int left = ColumnsLeft() - (kMnMajor ? 0 : row);
      if (left <= 0) break;
      const int available = kMnMajor ? (row + WeightRow() < depth_ ? min(left, 16) : 0)
                                     : Clip(depth_ - 16 * WeightChunk(), 16);
      const uint32_t at = to + WeightOffset(row + WeightRow());
      if (a.weight_access_bytes == 16) {
        CopyAsync16(at, available > 0 ? from : a.weights, available);
      } else {
        CopyNarrow(at, available > 0 ? from : a.weights, available, a.weight_access_bytes);
      }
      from += kWeightRowsPerPass * a.weight_pitch;
    }
  }

  __device__ __forceinline__ void LoadAllActivations(const Arguments& a, uint32_t to) const {
    const Activation* from = activations_;
    const int left = rows_ - ActivationRow();
#pragma unroll
    for (int row = 0; row < 8 * kRowFragments; row += kActivationRowsPerPass) {
      if (left > row) CopyChunk(to + ActivationOffset(row + ActivationRow()), from, 8);
      from += kActivationRowsPerPass * a.activation_row;
    }
  }

  __device__ __forceinline__ void LoadSomeActivations(const Arguments& a, uint32_t to) const {
    const Activation* from = activations_;
    const int count = Clip(depth_ - 8 * ActivationChunk(), 8);
    const int end = min(8 * kRowFragments, rows_);
#pragma unroll 1
    for (int row = ActivationRow(); row < end; row += kActivationRowsPerPass) {
      const uint32_t at = to + ActivationOffset(row);
      if (a.activations_vectorized) {
        CopyChunk(at, count > 0 ? from : static_cast<const Activation*>(a.activations), count);
      } else {
        CopyScattered(at, from, a.activation_depth, count);
      }
      from += kActivationRowsPerPass * a.activation_row;
    }
  }

  const uint8_t* weights_;
  const Activation* activations_;
  int columns_, rows_, depth_;  // left from the tile's first on
};

// The ring of stages of a CTA, and its way along K.
//   kActivation    type of the activations
//   kMnMajor       weights are [K, N]; else [N, K]
//   kRowFragments  rows of the tile in units of 8
//   kOrder         of depths
//   kFine          whether a stage has fine scales
template <DType kActivation, bool kMnMajor, int kRowFragments, Order kOrder, bool kFine = false>
class Pipeline {
 public:
  //   depth_tile  the first tile of K
  __device__ __forceinline__ Pipeline(const Arguments& a, const BlockTile& tile, int32_t depth_tile,
                                      uint8_t* stages)
      : a_(a),
        // Weights for several row tiles should stay in L2. Weights for one row tile should not
        // evict the activations.
        policy_(a.schedule.row_tiles == 1 ? ReadOncePolicy() : ReadAgainPolicy()),
        depth_tile_(depth_tile),
        stages_(stages),
        loader_(a, tile, depth_tile),
        scales_(a, tile, depth_tile) {
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) Fill(stage);
  }

  // Waits for the next stage and returns it. It may be read until the next call.
  __device__ __forceinline__ const uint8_t* Next() {
    WaitForCopies<kStages - 2>();
    if constexpr (kFine) scales_.Widen(a_, ScaleSlots(stage_));
    if constexpr (kOrder == Order::kWgmma) FenceAsyncProxy();
    // After this, all threads' copies of this stage have arrived, and no thread still reads the
    // stage to be filled next.
    __syncthreads();
    Fill(stage_ == 0 ? kStages - 1 : stage_ - 1);
    const uint8_t* ready = stages_ + stage_ * kStageBytes;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return ready;
  }

 private:
  static constexpr int kStages = kFine ? kFineStages : StagesFor(kRowFragments);
  static constexpr int kStageBytes = SharedBytes(kRowFragments, kFine) / kStages;
  struct NoLoader {
    __device__ __forceinline__ NoLoader(const Arguments&, const BlockTile&, int32_t) {}
  };

  __device__ __forceinline__ uint8_t* ScaleSlots(int stage) const {
    return stages_ + stage * kStageBytes + StageBytes(kRowFragments);
  }

  // Starts the copies of the next tile of K, if there is one. Commits a group even if it is empty:
  // `Next` counts groups.
  __device__ __forceinline__ void Fill(int stage) {
    if (depth_tile_ < a_.schedule.depth_tiles) {
      uint32_t to = SharedAddress(stages_) + stage * kStageBytes;
      // Computed here, and not again in front of each copy, as the compiler may choose: 16 rows
      // times 28672 x 8192 then took 99 us on an H200 instead of 87.
      asm volatile("" : "+r"(to));
      loader_.LoadWeights(a_, to, policy_);
      loader_.LoadActivations(a_, to + kWeightBytes);
      loader_.Advance(a_);
      if constexpr (kFine) {
        scales_.Load(a_, ScaleSlots(stage));
        scales_.Advance(a_);
      }
      depth_tile_ += a_.schedule.split;
    }
    CommitCopies();
  }

  const Arguments& a_;
  uint64_t policy_;
  int32_t depth_tile_;  // the next to copy
  uint8_t* stages_;
  int stage_ = 0;  // the next to read
  Loader<kActivation, kMnMajor, kRowFragments, kOrder> loader_;
  std::conditional_t<kFine, FineScaleLoader<kMnMajor>, NoLoader> scales_;
};

}  // namespace jaxfp8::cuda::w8a16
