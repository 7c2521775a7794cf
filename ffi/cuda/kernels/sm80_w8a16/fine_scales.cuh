// Scales of `sm80_w8a16` that change every 32 or 64 of K: a stage has those of its tile.
//
//   weights    thread t copies four neighbours                         slot of 16 bytes
//   [N, K]     column t, its blocks along K (two of 64)                t % 4 * 32 + t / 4
//   [K, N]     block t / 32, columns 4q ... 4q + 3, where q = t % 32   t / 32 * 32 + q
//
// So a lane finds the scales of its four columns in four slots, 32 slots apart, or in one for each
// block. Either way the slots of a warp are neighbours, without bank conflicts.
//
// Runs beyond the last block are zeros: no product may be multiplied by what was in memory.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {

// A scale in shared memory, as it is stored.
__device__ __forceinline__ uint32_t LoadStored(const uint8_t* from, ScaleForm form) {
  if (form == ScaleForm::kE8M0) return *from;
  if (form >= ScaleForm::kBF16) return *reinterpret_cast<const uint16_t*>(from);
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ void StoreStored(uint8_t* to, ScaleForm form, uint32_t stored) {
  if (form == ScaleForm::kE8M0) {
    *to = static_cast<uint8_t>(stored);
  } else if (form >= ScaleForm::kBF16) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(stored);
  } else {
    *reinterpret_cast<uint32_t*>(to) = stored;
  }
}

// Copies the scales of a stage.
//   kMnMajor  weights are [K, N]; else [N, K]
template <bool kMnMajor>
class FineScaleLoader {
 public:
  __device__ __forceinline__ FineScaleLoader(const Arguments& a, const BlockTile& tile)
      : batch_(tile.batch * a.scale_batch + PastScales(a)),
        column_(tile.column_tile * kTileColumns +
                (kMnMajor ? 4 * (threadIdx.x % 32) : threadIdx.x)),
        blocks_((a.depth + a.fine_depth - 1) / a.fine_depth) {}

  // Starts the copies for a tile of K.
  //   to  the slots
  __device__ __forceinline__ void Load(const Arguments& a, int32_t depth_tile, uint8_t* to) const {
    if (!a.scales) return;
    const int32_t per_tile = kTileDepth / a.fine_depth, first = depth_tile * per_tile;
    const int32_t thread = threadIdx.x;
    const int32_t block = kMnMajor ? first + thread / 32 * per_tile / 4 : first;
    uint8_t* slot = to + 16 * (kMnMajor ? thread : thread % 4 * 32 + thread / 4);
    const int32_t count = kMnMajor ? (block < blocks_ ? min(4, a.columns - column_) : 0)
                                   : (column_ < a.columns ? min(per_tile, blocks_ - block) : 0);
    if (a.fine_runs) {
      CopyRun(a, block, max(count, 0), kMnMajor ? 4 : per_tile, SharedAddress(slot));
    } else {
      CopyEach(a, block, count, slot);
    }
  }

  // The scales of a lane's columns for 32 of K.
  //   block  of the stage, 0 to 3
  __device__ __forceinline__ static void Read(const Arguments& a, const uint8_t* slots, int block,
                                              float (&scale)[4]) {
    const int quad = ColumnOf(threadIdx.x / 32, threadIdx.x % 32) / 4;
    const int size = BytesOf(a.scale_form), at = a.fine_depth == kFineDepth ? block : block / 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int slot = (kMnMajor ? block : j) * 32 + quad;
      const uint8_t* from = slots + 16 * slot + size * (kMnMajor ? j : at);
      scale[j] = a.scales ? ScaleOf(a.scale_form, LoadStored(from, a.scale_form)) : 1.0f;
    }
  }

 private:
  __device__ __forceinline__ const uint8_t* At(const Arguments& a, int32_t column,
                                               int32_t block) const {
    const int32_t scale = a.tile_columns == 1 ? column : column / a.tile_columns;
    const int64_t at = batch_ + int64_t{scale} * a.scale_column + block * a.scale_depth;
    return static_cast<const uint8_t*>(a.scales) + at * BytesOf(a.scale_form);
  }

  // An aligned run of `all`, of which `count` exist.
  __device__ __forceinline__ void CopyRun(const Arguments& a, int32_t block, int32_t count,
                                          int32_t all, uint32_t slot) const {
    const uint8_t* from = count > 0 ? At(a, column_, block) : static_cast<const uint8_t*>(a.scales);
    const int size = BytesOf(a.scale_form), bytes = size * count;
    if (size * all == 16) {
      CopyAsync16(slot, from, bytes);
    } else if (size * all == 8) {
      CopyAsync8(slot, from, bytes);
    } else {
      CopyAsync4(slot, from, bytes);
    }
  }

  __device__ __forceinline__ void CopyEach(const Arguments& a, int32_t block, int32_t count,
                                           uint8_t* slot) const {
    uint32_t stored[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) continue;
      const uint8_t* from = kMnMajor ? At(a, column_ + i, block) : At(a, column_, block + i);
      stored[i] = LoadScale(from, a.scale_form, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      StoreStored(slot + i * BytesOf(a.scale_form), a.scale_form, stored[i]);
  }

  int64_t batch_;
  int32_t column_, blocks_;
};

}  // namespace jaxfp8::cuda::w8a16
