// The epilogue of products with accumulators in memory, as after cuBLASLt.
//
//   x = acc - za * colsum - zb * rowsum + depth * za * zb        exact, in integers
//   y = activation(x * lhs_scale * rhs_scale + residual + bias)  float32
//   amax = max |y|;  out = cast(y / out_scale)                   one rounding

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// A part of the accumulators: rows [row, row + rows) and columns [column, column + columns) of
// `batches` batch indices from `batch` on. The accumulator of (b, r, c) is at (b - batch) *
// batch_stride + (r - row) * row_stride + (c - column), in elements.
struct Slab {
  DType dtype = DType::kNone;  // int32 or float32
  int64_t batch = 0, batches = 1;
  int64_t row = 0, rows = 0;
  int64_t column = 0, columns = 0;
  int64_t batch_stride = 0, row_stride = 0;
};

// The corrections of the accumulators for one side.
struct Correction {
  bool scale = false;       // multiply by the scale
  int64_t depth = 0;        // the K index of the scale; 0 if it is constant along K
  bool zero_point = false;  // subtract the zero point; int32 accumulators only
  int32_t shift = 0;        // added to the zero point: -128 for uint8 packed as int8
  // Sums over K of the values as multiplied. The sum of (b, f) is at (b - batch) * line_sums_batch
  // + (f - row or column). Needed if the OTHER side has a zero point or a shift; null otherwise.
  const int32_t* line_sums = nullptr;
  int64_t line_sums_batch = 0;
};

struct EpilogueRequest {
  Slab slab;
  Correction lhs, rhs;
};

// Applies the epilogue to a slab. The amax of the problem is only raised, so clear it first.
Status LaunchEpilogue(const Problem& problem, const EpilogueRequest& request, const void* sums,
                      const Buffers& buffers, cudaStream_t stream);

// Clears the amax of the whole problem, if it has one.
Status ClearAmax(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

// 1 / x on the device: cuBLASLt multiplies by a scale, our definition divides. It is rounded once.
// If it overflows and x is not 0, it is the largest float, so that 0 times it stays 0.
Status LaunchReciprocal(const float* x, float* inverse, cudaStream_t stream);

}  // namespace jaxfp8::cuda
