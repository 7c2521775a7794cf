// The second kernel of `sm80_w8a16` on devices without clusters, for a split K. It adds the sums of
// all ranks of a tile from the workspace, and applies the epilogue (split_k.cuh).

#pragma once

#include "cuda/kernels/sm80_w8a16/split_k.cuh"

namespace jaxfp8::cuda::w8a16 {

// The sums of all ranks in the workspace, written by the kernel before.
struct WorkspaceSums {
  const float* at;
  int64_t rank_stride;

  __device__ __forceinline__ float4 Load(int rank, int row, int column) const {
    return __ldg(
        reinterpret_cast<const float4*>(at + rank * rank_stride + row * kTileColumns + column));
  }
  __device__ __forceinline__ void Wait() const {}
};

inline constexpr int kReduceThreads = 128;

// A CTA adds up 128 quads of an output tile.
//   blockIdx.x   the output tile
//   blockIdx.y   the block's quads
//   blockIdx.z   the outer batch index
__global__ void __launch_bounds__(kReduceThreads)
    ReducePartials(const __grid_constant__ Arguments a, int tile_rows) {
  const int64_t stride = int64_t{min(a.rows, tile_rows)} * kTileColumns;
  const WorkspaceSums sums{a.partials + OutputTileOfBlock() * a.schedule.split * stride, stride};
  const int quad = blockIdx.y * kReduceThreads + threadIdx.x;
  StoreTile(a, TileOfBlock(a, blockIdx.x, tile_rows), tile_rows, quad, gridDim.y * kReduceThreads,
            sums);
}

}  // namespace jaxfp8::cuda::w8a16
