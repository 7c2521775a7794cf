// A correctly rounded quotient that is fast, for the codes of `jaxfp8.quantize`. Shared by the
// kernels and the host tests.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_QUOTIENT_CUH_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_QUOTIENT_CUH_

#include <cfloat>
#include <cmath>

#include "common/quantize_scale.h"
#include "cuda/kernels/common/element.cuh"

namespace jaxfp8::cuda {

// A divisor brought near 1 by a power of two, which x has to be multiplied by as well.
struct Divisor {
  float value, reciprocal;
  float factor;
};

// Between these, quotients need no factor. A smaller divisor could bring the remainder of a
// quotient that matters under the smallest float32; the reciprocal of a larger one is subnormal.
inline constexpr float kLeastDivisor = 0x1p-80f, kGreatestDivisor = 0x1p80f;

JAXFP8_HD float Reciprocal(float value) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(value);
#else
  return 1.0f / value;
#endif
}

// Where x times the factor overflows or underflows, the quotient is past 2^107 or below 2^-126. A
// scale of 0 counts as 1; x over infinity is 0 or NaN. Selections rather than branches: a compiler
// that follows each branch through the code behind it takes minutes.
JAXFP8_HD Divisor MakeDivisor(float scale) {
  const float magnitude = fabsf(scale);
  const bool infinite = magnitude > FLT_MAX;
  float factor = magnitude < kLeastDivisor ? 0x1p100f : 1.0f;
  factor = magnitude > kGreatestDivisor ? 0x1p-60f : factor;
  factor = infinite ? 0.0f : factor;
  const float value = magnitude == 0.0f || infinite ? 1.0f : magnitude * factor;
  factor = magnitude == 0.0f ? 1.0f : copysignf(factor, scale);
  return {value, Reciprocal(value), factor};
}

// x / d, rounded like the division, or a number that becomes the same 8-bit code.
//
// The product with the correctly rounded reciprocal is off by 2 ulp at most, one correction makes
// it one of the two floats next to the quotient, and a second one the nearest (Markstein's
// theorem; its remainder is exact because nothing here underflows unless the quotient is below
// 2^-23, which is code 0 of its sign). The remainder is taken as q * d - x, so that a quotient of
// -0 stays -0. Beyond 2^20 every type saturates, and infinities and NaN may not meet a remainder.
JAXFP8_HD float Quotient(float x, Divisor d) {
  const float scaled = x * d.factor;
  const float rough = scaled * d.reciprocal;
  const float close = fmaf(-fmaf(rough, d.value, -scaled), d.reciprocal, rough);
  const float exact = fmaf(-fmaf(close, d.value, -scaled), d.reciprocal, close);
  return fabsf(rough) < 0x1p20f ? exact : rough;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_QUOTIENT_CUH_
