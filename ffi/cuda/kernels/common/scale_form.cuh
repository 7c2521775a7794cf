// The stored forms of scales: a kernel loads a scale as bits, and makes a float of it at its use.

#pragma once

#include <cstdint>

#include "cuda/kernels/common/element.cuh"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// float32, float32 to be read as rounded to bfloat16, 16 bits, or exponents of 8.
enum class ScaleForm : uint8_t { kF32, kRounded, kBF16, kF16, kE8M0 };

JAXFP8_HD constexpr int BytesOf(ScaleForm form) {
  return form == ScaleForm::kE8M0 ? 1 : form >= ScaleForm::kBF16 ? 2 : 4;
}

inline ScaleForm ScaleFormOf(const Side& side) {
  if (side.scale_rounded) return ScaleForm::kRounded;
  if (side.HasExponents()) return ScaleForm::kE8M0;
  if (side.scale_type == DType::kBF16) return ScaleForm::kBF16;
  return side.scale_type == DType::kF16 ? ScaleForm::kF16 : ScaleForm::kF32;
}

#ifdef __CUDACC__

// A scale as it is stored.
__device__ __forceinline__ uint32_t LoadScale(const void* scales, ScaleForm form, int64_t at) {
  if (form == ScaleForm::kE8M0) return __ldg(static_cast<const uint8_t*>(scales) + at);
  if (form >= ScaleForm::kBF16) return __ldg(static_cast<const uint16_t*>(scales) + at);
  return __ldg(static_cast<const uint32_t*>(scales) + at);
}
__device__ __forceinline__ float ScaleOf(ScaleForm form, uint32_t stored) {
  switch (form) {
    case ScaleForm::kF32:
      return __uint_as_float(stored);
    case ScaleForm::kRounded:
      return DecodeBF16(EncodeBF16(__uint_as_float(stored)));
    case ScaleForm::kBF16:
      return DecodeFloat16<DType::kBF16>(stored);
    case ScaleForm::kE8M0:
      return DecodeE8M0(static_cast<uint8_t>(stored));
    default:
      return DecodeFloat16<DType::kF16>(stored);
  }
}

// Calls `run.template operator()<kForm>()`: one branch for any number of scales.
template <typename F>
__device__ __forceinline__ void WithForm(ScaleForm form, F&& run) {
  switch (form) {
    case ScaleForm::kF32:
      return run.template operator()<ScaleForm::kF32>();
    case ScaleForm::kRounded:
      return run.template operator()<ScaleForm::kRounded>();
    case ScaleForm::kBF16:
      return run.template operator()<ScaleForm::kBF16>();
    case ScaleForm::kE8M0:
      return run.template operator()<ScaleForm::kE8M0>();
    default:
      return run.template operator()<ScaleForm::kF16>();
  }
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
