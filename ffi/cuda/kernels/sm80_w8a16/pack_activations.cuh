// Packs the activations for `wgmma`: the kernel that runs before `sm80_w8a16` on sm_90a.
//
//   global [M, K], any strides
//      |  a thread packs one chunk of 16 bytes: 8 depths of a row
//      v
//   workspace, tile after tile as they lie in a stage: a tile has 8 * kRowFragments rows x 128 K
//      step 0: half 0: row 0 [chunk] row 1 [chunk] ...   half 1: row 0 [chunk] ...
//      step 1: ...                                       8 steps
//   Word t of a chunk holds the two depths that lane t of four multiplies there (`DepthOf`). Rows
//   and depths past the end are 0.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_PACK_ACTIVATIONS_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_PACK_ACTIVATIONS_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kPackActivationsThreads = 128;

struct PackActivationsArguments {
  const uint16_t* from = nullptr;
  uint4* to = nullptr;
  int64_t row_stride = 0, depth_stride = 0, batch_stride = 0;
  int64_t chunks = 0;  // to write, 16 bytes each
  int32_t rows = 0, depth = 0, tile_rows = 0, row_tiles = 0, depth_tiles = 0;
};

__global__ void __launch_bounds__(kPackActivationsThreads)
    PackActivations(const __grid_constant__ PackActivationsArguments a) {
  LaunchDependentGrids();
  const int64_t index = int64_t{blockIdx.x} * kPackActivationsThreads + threadIdx.x;
  if (index >= a.chunks) return;
  const int64_t matrix = index / a.tile_rows, tile = matrix / 16, columns = tile / a.depth_tiles;
  const int64_t batch = columns / a.row_tiles;
  const int step = static_cast<int>(matrix % 16) / 2, half = static_cast<int>(matrix % 2);
  const int64_t row =
      (columns - batch * a.row_tiles) * a.tile_rows + (index - matrix * a.tile_rows);
  const int64_t depth = (tile - columns * a.depth_tiles) * kTileDepth + 2 * half;
  const uint16_t* from = a.from + batch * a.batch_stride + row * a.row_stride;
  uint32_t words[4] = {};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t k = depth + DepthOf(t, step) + i;
      if (row < a.rows && k < a.depth) {
        words[t] |= static_cast<uint32_t>(from[k * a.depth_stride]) << (16 * i);
      }
    }
  }
  a.to[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_PACK_ACTIVATIONS_CUH_
