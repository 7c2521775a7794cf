// Encodes what a norm, a gate or a cast produces with scales that are given, in one layout or two.
//
//   y            = the producer's values, rounded to 16 bits
//   codes        = saturate(round(y / scale)), for each scale; a scale of 0 counts as 1
//   transposed   = the same codes as [columns, rows]
//   amax         = max |y|, where infinities and NaN do not count

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "cuda/kernels/produce/production.h"

namespace jaxfp8::cuda {

inline constexpr int kMostScales = 4;

struct EncodeProblem : Production {
  DType out = DType::kNone;  // float8_e4m3fn or float8_e5m2
  int64_t scales = 1;        // up to kMostScales
  bool transposed = false;
};

// A norm's `inverse` is 1 / sqrt(mean(c^2) + epsilon) of each row, and `mean` what LayerNorm takes
// away; both [rows].
struct EncodeBuffers : ProductionBuffers {
  const float *inverse = nullptr, *mean = nullptr;
  const float* scale[kMostScales] = {};
  uint8_t *codes[kMostScales] = {}, *transposed[kMostScales] = {};
  float* amax = nullptr;
};

// Why the kernel cannot compute a problem.
Status EncodeWhyNot(const EncodeProblem& problem);

Status LaunchEncode(const EncodeProblem& problem, const EncodeBuffers& buffers,
                    cudaStream_t stream);

}  // namespace jaxfp8::cuda
