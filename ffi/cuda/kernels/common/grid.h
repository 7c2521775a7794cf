// Dimensions of a grid, from numbers that may be larger.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_GRID_H_
#define JAXFP8_CUDA_KERNELS_COMMON_GRID_H_

#include <cstdint>

namespace jaxfp8::cuda {

// So many blocks as a dimension of a grid; 0, which no launch accepts, where it has fewer.
inline unsigned GridSize(int64_t blocks) {
  return blocks < 0 || blocks >> 31 ? 0 : static_cast<unsigned>(blocks);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_GRID_H_
