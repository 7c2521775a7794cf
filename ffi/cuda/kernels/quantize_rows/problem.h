// Quantises rows that a norm or a gate produces, by the program's own rule for the scale.
//
//   y     = the producer's row, rounded to the type of x
//   amax  = max |y|; NaN counts, and infinities do
//   scale = max(max(amax, amax_floor) * float32(1 / highest), scale_floor)
//   code  = saturate(round(y / scale))
//
// A row of zeros has the scale `of_zeros`, one with NaN the scale `of_nan`. A scale of 0 divides:
// 0 / 0 is NaN in FP8, and 0 in int8.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PROBLEM_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PROBLEM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/dtype.h"

namespace jaxfp8::cuda {

// What makes a row.
//   kElementwise  activation(x) * factor
//   kNorm         c * rsqrt(mean(c^2) + epsilon) * gain + shift
//                 c = x, or x - mean(x) if `centred`
enum class Producer : uint8_t { kElementwise, kNorm };

// x, `factor` and the codes are [rows, columns], dense; `gain` and `shift` [columns]; scale and
// amax [rows].
struct RowsProblem {
  int64_t rows = 0, columns = 0;
  DType in = DType::kNone;   // bfloat16 or float16: x, `factor` and the row that is quantised
  DType out = DType::kNone;  // float8_e4m3fn, float8_e5m2 or int8
  Producer producer = Producer::kElementwise;
  Activation activation = Activation::kNone;  // its value is rounded to the type of x
  bool has_factor = false;
  // Of a norm. The type of x, float32 or, where there is none, DType::kNone.
  DType gain = DType::kNone, shift = DType::kNone;
  bool centred = false;
  bool rounded_first = false;   // what the gain multiplies is rounded to the type of x
  bool rounded_second = false;  // and so is what the shift is added to
  float epsilon = 0.0f;
  // Of the scale.
  float amax_floor = 0.0f, scale_floor = 0.0f, of_zeros = 0.0f, of_nan = 0.0f;
};

struct RowsBuffers {
  const void *x = nullptr, *factor = nullptr, *gain = nullptr, *shift = nullptr;
  void* codes = nullptr;
  float *scale = nullptr, *amax = nullptr;
};

// Why the kernel cannot compute a problem, "" if it can.
std::string RowsWhyNot(const RowsProblem& problem);

std::string LaunchRows(const RowsProblem& problem, const RowsBuffers& buffers, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PROBLEM_H_
