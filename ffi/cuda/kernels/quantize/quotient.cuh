// A fast, correctly rounded division by a scale, for codes with the same bits on every platform.
// Shared by the kernels and the host tests.

#pragma once

#include <cfloat>
#include <cmath>

#include "common/quantize_scale.h"
#include "cuda/kernels/common/element.cuh"

namespace jaxfp8::cuda {

// A divisor scaled towards 1 by a power of two, `factor`. x must be multiplied by it too.
struct FloatDivisor {
  float value, reciprocal;
  float factor;
};

// Divisors between these need no factor. With a smaller one, the remainder in `Quotient` could
// underflow; the reciprocal of a larger one is subnormal.
inline constexpr float kMinDivisor = 0x1p-80f, kMaxDivisor = 0x1p80f;

JAXFP8_HD float Reciprocal(float value) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(value);
#else
  return 1.0f / value;
#endif
}

// A scale of 0 counts as 1, and x / infinity is 0 or NaN. Where x * factor overflows or underflows,
// the quotient is above 2^107 or below 2^-126. Selections instead of branches, because a compiler
// that specialises the code behind each branch takes minutes.
JAXFP8_HD FloatDivisor MakeFloatDivisor(float scale) {
  const float magnitude = fabsf(scale);
  const bool infinite = magnitude > FLT_MAX;
  float factor = magnitude < kMinDivisor ? 0x1p100f : 1.0f;
  factor = magnitude > kMaxDivisor ? 0x1p-60f : factor;
  factor = infinite ? 0.0f : factor;
  const float value = magnitude == 0.0f || infinite ? 1.0f : magnitude * factor;
  factor = magnitude == 0.0f ? 1.0f : copysignf(factor, scale);
  return {value, Reciprocal(value), factor};
}

// x / d, correctly rounded, or a number that encodes to the same 8-bit code.
//
// The product with the correctly rounded reciprocal is off by at most 2 ulp. One correction gives
// one of the two floats next to the quotient, a second one the nearest (Markstein's theorem). The
// remainder is exact, because it underflows only for quotients below 2^-23, which are code 0. It is
// computed as q * d - x, so that a quotient of -0 stays -0. Above 2^20 every type saturates: there
// the correction is skipped, since it would turn infinity into NaN.
JAXFP8_HD float Quotient(float x, FloatDivisor d) {
  const float scaled = x * d.factor;
  const float rough = scaled * d.reciprocal;
  const float close = fmaf(-fmaf(rough, d.value, -scaled), d.reciprocal, rough);
  const float exact = fmaf(-fmaf(close, d.value, -scaled), d.reciprocal, close);
  return fabsf(rough) < 0x1p20f ? exact : rough;
}

// Whether `QuotientInRange` divides every x up to `largest`.
JAXFP8_HD bool InRange(float largest, FloatDivisor d) {
  return d.factor == 1.0f && largest < 0x1p19f * d.value;
}

// `Quotient` where the factor is 1 and every quotient is below 2^20.
JAXFP8_HD float QuotientInRange(float x, FloatDivisor d) {
  const float rough = x * d.reciprocal;
  const float close = fmaf(-fmaf(rough, d.value, -x), d.reciprocal, rough);
  return fmaf(-fmaf(close, d.value, -x), d.reciprocal, close);
}

}  // namespace jaxfp8::cuda
