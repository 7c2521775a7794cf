// From accumulators in memory to the output: scales, zero points, residual, bias, activation, amax,
// out_scale, one rounding.
//
//   total = sums - za * colsum - zb * rowsum + depth * za * zb       exact, in integers
//   y = activation(total * lhs_scale * rhs_scale + residual + bias)  float32
//   amax = max |y|;  out = cast(y / out_scale)

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_EPILOGUE_H_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_EPILOGUE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

// The accumulators of rows [row, row + rows) and columns [column, column + columns) of `batches`
// batch indices from `batch`: the one of (b, r, c) is at
// (b - batch) * batch_stride + (r - row) * row_stride + (c - column).
struct Slab {
  DType dtype = DType::kNone;  // int32, float32 or bfloat16
  int64_t batch = 0, batches = 1;
  int64_t row = 0, rows = 0;
  int64_t column = 0, columns = 0;
  int64_t batch_stride = 0, row_stride = 0;
};

// What the accumulators still lack of one side.
struct Correction {
  bool scale = false;       // times the scale of the free index, at depth index `depth`
  int64_t depth = 0;        //   (0 where the scale is constant along the depth)
  bool zero_point = false;  // less the zero point; int32 accumulators only
  int32_t shift = 0;        // added to the zero point, or instead of one: -128 for uint8 packed as
                            // int8
  // Sums over the depth of the values as multiplied, from `LaunchLineSums`: the one of (b, f) is at
  // (b - batch) * count + (f - row or column), with count the slab's rows or columns. Needed where
  // the OTHER side has a zero point or a shift; null otherwise.
  const int32_t* sums = nullptr;
};

struct EpilogueRequest {
  Slab slab;
  Correction lhs, rhs;
};

// `problem.amax`, where there is one, is raised and never lowered: clear it first.
std::string LaunchEpilogue(const Problem& problem, const EpilogueRequest& request, const void* sums,
                           const Buffers& buffers, cudaStream_t stream);

// Zeros to the amax of the whole problem; nothing where it has none.
std::string ClearAmax(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_EPILOGUE_H_
