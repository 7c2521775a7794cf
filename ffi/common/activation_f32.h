// The activations in float32: for GPUs, most of which have slow float64, and for CPU vectors, which
// hold twice as many float32.
//
// Let t be the argument of the exponential. Where e^-|t| is a normal float32, each is within a few
// ulp of its float64 twin in activation.h; the tanh form of gelu loses about |t| ulp more, because
// t is rounded. Where it is subnormal, the error is at most 1e-42 on the GPU and 1e-36 on the CPU,
// which takes such powers for 0. Infinities and NaN are as in float64.

#pragma once

#include <cmath>

#include "common/activation.h"
#include "common/decode.h"

namespace jaxfp8 {

// max(x, bound) and min(x, bound); the bound if x is NaN.
JAXFP8_HD float AtLeast(float bound, float x) {
#ifdef __CUDA_ARCH__
  return fmaxf(x, bound);
#else
  return x > bound ? x : bound;
#endif
}

JAXFP8_HD float AtMost(float bound, float x) {
#ifdef __CUDA_ARCH__
  return fminf(x, bound);
#else
  return x < bound ? x : bound;
#endif
}

// `Polynomial` by fused multiply-adds.
template <typename... Coefficients>
JAXFP8_HD float PolynomialF32(float x, float c0, Coefficients... rest) {
  ((c0 = fmaf(c0, x, rest)), ...);
  return c0;
}

// 2^x for -250 <= x <= 0. On the CPU subnormal results are 0, because computing with them is slow.
JAXFP8_HD float Exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits. The series is exact to 5e-9.
  constexpr float kToInteger = 0x1.8p23f;
  const float shifted = x + kToInteger;
  const float r = x - (shifted - kToInteger);
  const float p = PolynomialF32(r, 1.5252734e-5f, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f,
                                5.5504109e-2f, 0.24022651f, 0.69314718f, 1.0f);
  const float power = FloatFromBits(BitsOf(1.0f) + (BitsOf(shifted) << 23));
  return x < -126.0f ? 0.0f : p * power;
#endif
}

// e^(x + low) for x <= 0 and |low| far below 1. NaN and x below -150 give the value at -150, 0.
JAXFP8_HD float ExpOfNegative(float x, float low) {
  constexpr float kLog2E = 0x1.715476p+0f, kLog2ELow = 0x1.4ae0bep-26f;
  const float bounded = AtLeast(-150.0f, x);
  const float high = bounded * kLog2E;
  const float rest = fmaf(bounded, kLog2ELow, fmaf(bounded, kLog2E, -high));
  const float power = Exp2(high);
  return fmaf(power, fmaf(rest, 0x1.62e43p-1f, low), power);
}

// x / (1 + e^-t), from e^-|t|; the denominator is between 1 and 2. Minus infinity times the 0 of
// e^-|t| is NaN, as it is in JAX.
JAXFP8_HD float TimesLogistic(float x, float t) {
  const float power = ExpOfNegative(-fabsf(t), 0.0f);
  const float above = t < 0.0f ? power : 1.0f;
#ifdef __CUDA_ARCH__
  return __fdividef(x * above, 1.0f + power);
#else
  return x * above / (1.0f + power);
#endif
}

JAXFP8_HD float ReluF32(float x) { return x < 0.0f ? 0.0f : x; }

JAXFP8_HD float SiluF32(float x) { return TimesLogistic(x, x); }

JAXFP8_HD float GeluTanhF32(float x) {
  constexpr float kTwiceSqrtTwoOverPi = 1.5957691216057308f;
  constexpr float kCubic = 0.044715f * kTwiceSqrtTwoOverPi;
  return TimesLogistic(x, x * fmaf(kCubic, x * x, kTwiceSqrtTwoOverPi));
}

// e^(z^2) * erfc(z) * (1 + 2z) for 0 <= z <= 10.5: a polynomial in q = (z - 2) / (z + 2); relative
// error 1.1e-7 with its rounding, but for that of q.
JAXFP8_HD float ScaledErfcF32(float q) {
  return PolynomialF32(q, -0.0004056065226905048f, -0.0012340409448370337f, 0.0013210707111284137f,
                       0.008637280203402042f, -0.008063466288149357f, -0.0542064793407917f,
                       0.1640559881925583f, -0.16603116691112518f, -0.09276401251554489f,
                       1.2769783735275269f);
}

JAXFP8_HD float GeluErfF32(float x) {
  // Past 14.8, e^(-x^2 / 2) is below every float32.
  const float magnitude = AtMost(14.8f, fabsf(x));
  const float square = magnitude * magnitude;
  const float low = fmaf(magnitude, magnitude, -square);
  const float z = magnitude * 0.70710678f;
  const float power = ExpOfNegative(-0.5f * square, -0.5f * low);
  // One division for both, by z + 2 and by 2 (1 + 2z).
  const float above = z + 2.0f, twice = fmaf(4.0f, z, 2.0f);
#ifdef __CUDA_ARCH__
  const float inverse = __fdividef(1.0f, above * twice);
#else
  const float inverse = 1.0f / (above * twice);
#endif
  const float scaled = ScaledErfcF32(fmaf(-4.0f * twice, inverse, 1.0f)) * (above * inverse);
  const float tail = fabsf(x) > 14.8f ? 0.0f : power * scaled;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

JAXFP8_HD float ApplyF32(Activation activation, float x) {
#define JAXFP8_APPLY(Name, text) \
  case Activation::k##Name:      \
    return Name##F32(x);
  switch (activation) {
    JAXFP8_ACTIVATIONS(JAXFP8_APPLY)
    case Activation::kNone:
    case Activation::kUnknown:
      break;
  }
#undef JAXFP8_APPLY
  return x;
}

}  // namespace jaxfp8
