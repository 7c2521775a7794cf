// Rows that a norm, an activation and a factor, or a cast produce, and their codes: by scales that
// are found (`RowsProblem`) or given (`EncodeProblem`).

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace jaxfp8::cuda {

inline constexpr int kMaxScales = 4;  // of one call

// What makes a row.
//   kElementwise  activation(x) * factor
//   kRmsNorm      c * inverse * gain + shift, c = x
//   kLayerNorm    the same, c = x - mean(x)
//   kCast         float32, rounded
enum class Producer : uint8_t { kElementwise, kRmsNorm, kLayerNorm, kCast };

// x and `factor` are [rows, columns], dense; `gain` and `shift` [columns].
struct Production {
  int64_t rows = 0, columns = 0;
  DType in = DType::kNone;  // bfloat16 or float16: the row that is made and, but for kCast, x
  Producer producer = Producer::kElementwise;
  Activation activation = Activation::kNone;  // its value is rounded to the type of the row
  bool has_factor = false;
  // Of a norm. The type of x, float32 or, where there is none, DType::kNone.
  DType gain = DType::kNone, shift = DType::kNone;
  bool rounded_first = false;   // what the gain multiplies is rounded to the type of x
  bool rounded_second = false;  // and so is what the shift is added to
};

// What rows are made of; null where there is none.
struct ProductionBuffers {
  const void *x = nullptr, *factor = nullptr, *gain = nullptr, *shift = nullptr;
};

// Quantizes rows that a norm or a gate produces, by the program's own rule for the scale.
//
//   y     = the producer's row, rounded to the type of x
//   amax  = max |y|; NaN counts, and infinities do
//   scale = max(max(amax, amax_floor) * float32(1 / highest), scale_floor)
//   code  = saturate(round(y / scale))
//
// A row of zeros has the scale `of_zeros`, one with NaN the scale `of_nan`. A scale of 0 divides:
// 0 / 0 is NaN in FP8, and 0 in int8.
//
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

// Encodes what a norm, a gate or a cast produces with scales that are given, in one layout or two.
//
//   y            = the producer's values, rounded to 16 bits
//   codes        = saturate(round(y / scale)), for each scale; a scale of 0 counts as 1
//   transposed   = the same codes as [columns, rows]
//   amax         = max |y|, where infinities and NaN do not count
struct EncodeProblem : Production {
  DType out = DType::kNone;  // float8_e4m3fn or float8_e5m2
  int64_t scales = 1;        // up to kMaxScales
  bool transposed = false;
};

// A norm's `inverse` is 1 / sqrt(mean(c^2) + epsilon) of each row, and `mean` what LayerNorm takes
// away; both [rows].
struct EncodeBuffers : ProductionBuffers {
  const float *inverse = nullptr, *mean = nullptr;
  const float* scale[kMaxScales] = {};
  uint8_t *codes[kMaxScales] = {}, *transposed[kMaxScales] = {};
  float* amax = nullptr;
};

// Why the kernel cannot compute a problem.
Status EncodeWhyNot(const EncodeProblem& problem);

Status LaunchEncode(const EncodeProblem& problem, const EncodeBuffers& buffers,
                    cudaStream_t stream);

}  // namespace jaxfp8::cuda
