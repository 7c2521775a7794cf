// The arguments of the kernel of `sm90_gemm`, and its instances.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_ARGUMENTS_H_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_ARGUMENTS_H_

#include <cuda.h>

#include <cstdint>

#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/sm90_gemm/layout.h"
#include "cuda/kernels/sm90_gemm/schedule.h"

namespace jaxfp8::cuda::sm90 {

// The scales of a side that change along K. That of line f and step s of batch index b is at
// b * batch_stride + f / tile_lines * line_stride + s / steps_per_scale * step_stride.
struct StepScales {
  const float* scale = nullptr;  // null: every scale is 1
  int64_t batch_stride = 0, line_stride = 0, step_stride = 0;
  Divisor tile_lines, steps_per_scale;
  int32_t last_line = 0;
  bool fours = false;  // the scales of four steps are 16 aligned bytes
};

struct Arguments {
  Schedule schedule;
  StepScales lhs_scales, rhs_scales;
  Epilogue epilogue;  // without its accumulators
  bool lhs_batched = false, rhs_batched = false;
  bool stores_directly = false;  // nothing but a cast follows the scaled sum
};

using KernelFunction = void (*)(Arguments, CUtensorMap lhs, CUtensorMap rhs);

struct Kernel {
  KernelFunction function = nullptr;
  int threads = 0, shared_bytes = 0;
};

// The kernel for a tile shape, or one without a function.
Kernel E4M3Kernel(DType rhs, Scaling scaling, TileShape tile);
Kernel E5M2Kernel(DType rhs, Scaling scaling, TileShape tile);

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_ARGUMENTS_H_
