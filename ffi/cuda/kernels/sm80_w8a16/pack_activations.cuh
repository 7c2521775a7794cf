// Activations as the warpgroup instruction of `sm80_w8a16` wants them: tiles of 8 * kEights rows
// and 128 depths, one after the other as they lie in shared memory, zeros where there are none.
//
// A tile is 16 matrices of half a step, a matrix blocks of eight lines of 16 bytes: a line is a
// row, its word t the two depths that lane t of four multiplies there (`DepthOf`).

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_PACK_ACTIVATIONS_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_PACK_ACTIVATIONS_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kPackThreads = 128;

struct PackArguments {
  const uint16_t* from = nullptr;
  uint4* to = nullptr;
  int64_t row_stride = 0, depth_stride = 0, batch_stride = 0;
  int64_t lines = 0;  // to make
  int32_t rows = 0, depth = 0, tile_rows = 0, row_tiles = 0, depth_tiles = 0;
};

__global__ void __launch_bounds__(kPackThreads)
    PackActivations(const __grid_constant__ PackArguments a) {
  LetNextLaunchStart();
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= a.lines) return;
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
