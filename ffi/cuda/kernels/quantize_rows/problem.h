// Quantises rows that a norm or a gate produces, by the program's own rule for the scale.
//
//   y     = the producer's row, rounded to the type of x
//   amax  = max |y|; NaN counts, and infinities do
//   scale = max(max(amax, amax_floor) * float32(1 / highest), scale_floor)
//   code  = saturate(round(y / scale))
//
// A row of zeros has the scale `of_zeros`, one with NaN the scale `of_nan`. A scale of 0 divides:
// 0 / 0 is NaN in FP8, and 0 in int8.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "cuda/kernels/produce/production.h"

namespace jaxfp8::cuda {

// The codes are [rows, columns], dense; scale and amax [rows]. A norm's inverse is
// rsqrt(mean(c^2) + epsilon).
struct RowsProblem : Production {
  DType out = DType::kNone;  // float8_e4m3fn, float8_e5m2 or int8
  float epsilon = 0.0f;      // of a norm
  // Of the scale.
  float amax_floor = 0.0f, scale_floor = 0.0f, of_zeros = 0.0f, of_nan = 0.0f;
};

struct RowsBuffers : ProductionBuffers {
  void* codes = nullptr;
  float *scale = nullptr, *amax = nullptr;
};

// Why the kernel cannot compute a problem.
Status RowsWhyNot(const RowsProblem& problem);

Status LaunchRows(const RowsProblem& problem, const RowsBuffers& buffers, cudaStream_t stream);

}  // namespace jaxfp8::cuda
