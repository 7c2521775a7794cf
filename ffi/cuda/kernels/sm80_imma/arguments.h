// The arguments of the kernels of `sm80_imma`, and its instances.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_ARGUMENTS_H_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_ARGUMENTS_H_

#include <cstdint>

#include "cuda/problem.h"

namespace jaxfp8::cuda::imma {

// A side of the product. A line is what one sum reads: a row of the activations, a column of the
// weights. Value (b, l, k) is at b * batch + l * line + k * depth, in elements.
struct Operand {
  const void* values = nullptr;
  int64_t batch = 0, line = 0, depth = 0;
  bool aligned = false;  // 16-byte loads along the axis whose stride is 1
  // The stored value that int8 code 1 of each line stands for. Null for a side that is int8
  // already.
  const float* step = nullptr;
  int64_t step_batch = 0;
};

struct Arguments {
  int32_t rows = 0, columns = 0, depth = 0;  // where each axis ends
  Operand activations, weights;
  // The exact sums of the piece, [batch, rows, pitch], the pitch a multiple of 8. They are added
  // to, and have to be 0 before, where K is split.
  int32_t* sums = nullptr;
  int64_t sums_batch = 0;
  int32_t pitch = 0;
  bool adds = false;
  // The piece of the output that is computed: from here on, and up to row `rows`.
  int32_t first_batch = 0, first_row = 0;
  // Block (x, y, z) has row tile x % row_tiles, column tile x / row_tiles, split y, and batch z of
  // the piece.
  int32_t row_tiles = 1, depth_tiles = 1, depth_tiles_per_split = 1;
};

// The arguments of the kernel that finds the steps of lines, and the scales of their codes; both
// [batch, lines].
struct LineScaleArguments {
  Operand operand;
  int32_t lines = 0, depth = 0;
  // The scales that the values have already, constant along K, or null.
  const float* given = nullptr;
  Tiles tiles;
  float *step = nullptr, *scale = nullptr;
};

// How activations reach the tensor cores.
enum class Dataflow : uint8_t {
  kCodes,      // 8-bit codes are in shared memory. FP8 is rounded to int8 in registers.
  kRegisters,  // 16-bit values are in shared memory, and are rounded to int8 in registers
  kShared,     // as before, but a block rounds them once, from shared to shared memory
};

using KernelFunction = void (*)(Arguments);
using LineScaleFunction = void (*)(LineScaleArguments);

// The instance for weights of one type, or null.
//   activation     int8, e4m3, bfloat16 or float16
//   mn_major       weights are [K, N]; else [N, K]
//   row_fragments  rows of an output tile in units of 16: 1 or 4
KernelFunction E4M3Kernel(DType activation, bool mn_major, int row_fragments);
KernelFunction E5M2Kernel(DType activation, bool mn_major, int row_fragments);

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_ARGUMENTS_H_
