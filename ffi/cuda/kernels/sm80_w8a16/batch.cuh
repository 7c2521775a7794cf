// The batch index of a block of `sm80_w8a16`.
//
//   batch of one axis                blockIdx.x counts all output tiles; blockIdx.z is 0
//   two axes, weights with jumps     blockIdx.z is the outer index, and blockIdx.x counts its tiles
//
// This needs no division. Blocks of the first outer index read no argument, and weights without
// jumps have no other blocks.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_BATCH_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_BATCH_CUH_

#include "cuda/kernels/sm80_w8a16/arguments.h"

namespace jaxfp8::cuda::w8a16 {

// The block's output tile. `tile` is its number within its outer index.
__device__ __forceinline__ TileCoord CoordOfBlock(const Arguments& a, int32_t tile) {
  TileCoord coord = a.schedule.CoordOf(tile);
  if (blockIdx.z != 0) coord.batch += static_cast<int32_t>(blockIdx.z) * a.inner_batch;
  return coord;
}

// The number of the block's output tile among all.
__device__ __forceinline__ int64_t OutputTileOfBlock() {
  return int64_t{blockIdx.z} * gridDim.x + blockIdx.x;
}

// The elements skipped by the jumps of the weights, and of their scales (problem.h).
__device__ __forceinline__ int64_t PastWeights(const Arguments& a) {
  return blockIdx.z == 0 ? 0 : blockIdx.z * a.weight_jump;
}
__device__ __forceinline__ int64_t PastScales(const Arguments& a) {
  return blockIdx.z == 0 ? 0 : blockIdx.z * a.scale_jump;
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_BATCH_CUH_
