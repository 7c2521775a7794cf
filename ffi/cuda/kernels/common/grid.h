// Grid dimensions from 64-bit counts.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_GRID_H_
#define JAXFP8_CUDA_KERNELS_COMMON_GRID_H_

#include <cstdint>

namespace jaxfp8::cuda {

// A number of blocks as a grid dimension. Returns 0, which every launch refuses, if it is too
// large.
inline unsigned GridSize(int64_t blocks) {
  return blocks < 0 || blocks >> 31 ? 0 : static_cast<unsigned>(blocks);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_GRID_H_
