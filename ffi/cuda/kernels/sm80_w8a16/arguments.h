// What a launch of `sm80_w8a16` is told, and the table of its instances.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_ARGUMENTS_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_ARGUMENTS_H_

#include <cstdint>

#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::w8a16 {

// Only what the kernel reads: every further line of constants costs it a miss before its first
// load.
struct Arguments {
  Schedule schedule;
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t weight_width = 1;        // bytes that may be read at once: 16, 4 or 1
  int32_t activation_vectors = 0;  // whether 8 activations may be read at once
  const uint8_t* weights = nullptr;
  const uint16_t* activations = nullptr;
  float* slots = nullptr;
  int64_t weight_line = 0, weight_batch = 0;  // strides, a line being as in shared memory
  int64_t activation_row = 0, activation_depth = 0, activation_batch = 0;
  const float* scales = nullptr;         // or null
  const int32_t* zero_points = nullptr;  // or null
  int64_t scale_batch = 0, scale_depth = 0;
  int32_t scale_column = 0;
  int32_t stretch = 1;       // depth tiles that share a scale
  int32_t tile_columns = 1;  // columns that share a scale
  uint32_t flip = 0;         // of `Decoder::FlipOf`
  DType weight = DType::kNone;
  bool subtracts = false;  // whether codes are more than turned into numbers: `Decoder::kSubtracts`
};

using KernelFunction = void (*)(Arguments);

// The kernel for weights of a type, or null. `weight` is e4m3, e5m2 or int8 (for uint8 too).
KernelFunction E4M3Kernel(DType wide, bool depth_major, int eights);
KernelFunction E5M2Kernel(DType wide, bool depth_major, int eights);
KernelFunction S8Kernel(DType wide, bool depth_major, int eights);

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_ARGUMENTS_H_
