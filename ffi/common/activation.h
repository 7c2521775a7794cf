// The activations in float64, without branches so that loops over them vectorise.
//
// A relative error of 1e-12 is far below the rounding of any output type, so the polynomials are
// shorter than those of a mathematical library.

#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "common/platform.h"

namespace jaxfp8 {

// The activations but "none", each with its name in calls. `Relu` computes kRelu in float64 and
// `ReluF32` in float32, and so on. tests/native/test_lists.py holds them against Python.
#define JAXFP8_ACTIVATIONS(V) \
  V(Relu, "relu")             \
  V(GeluTanh, "gelu_tanh")    \
  V(GeluErf, "gelu_erf")      \
  V(Silu, "silu")

#define JAXFP8_ENUMERATOR(Name, text) k##Name,
enum class Activation : uint8_t { kUnknown, kNone, JAXFP8_ACTIVATIONS(JAXFP8_ENUMERATOR) };
#undef JAXFP8_ENUMERATOR

#define JAXFP8_TEXT(Name, text) ", " text
inline constexpr char kActivationNames[] = "none" JAXFP8_ACTIVATIONS(JAXFP8_TEXT);
#undef JAXFP8_TEXT

inline Activation ParseActivation(std::string_view name) {
#define JAXFP8_PARSE(Name, text) \
  if (name == text) return Activation::k##Name;
  JAXFP8_ACTIVATIONS(JAXFP8_PARSE)
#undef JAXFP8_PARSE
  return name == "none" ? Activation::kNone : Activation::kUnknown;
}

// c0 x^n + c1 x^(n - 1) + ... + cn, each step a multiply-add.
template <typename... Coefficients>
JAXFP8_HD double Polynomial(double x, double c0, Coefficients... rest) {
  ((c0 = c0 * x + rest), ...);
  return c0;
}

// e^x, with x clamped to [-700, 700]; NaN stays NaN.
JAXFP8_HD double Exp(double x) {
  x = x > 700.0 ? 700.0 : x;
  x = x < -700.0 ? -700.0 : x;
  // Adding 1.5 * 2^52 leaves the nearest integer in the low bits.
  constexpr double kToInteger = 0x1.8p52;
  const double shifted = x * 1.4426950408889634 + kToInteger;
  const double n = shifted - kToInteger;
  const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  const double p = Polynomial(r, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                              1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
  const uint64_t exponent = std::bit_cast<uint64_t>(shifted) << 52;
  return std::bit_cast<double>(std::bit_cast<uint64_t>(p) + exponent);
}

// e^(z^2) * erfc(z) for z >= 0: a polynomial in (z - 3.75) / (z + 3.75) fitted to the function
// times 1 + 2z; relative error 1.2e-12.
JAXFP8_HD double ScaledErfc(double z) {
  const double q = 1.0 - 7.5 / (z + 3.75);
  const double p = Polynomial(q, 9.400493425333757e-07, -1.035154633043317e-06,
                              -1.0112601290798755e-05, 2.240377753442637e-05, 5.039045352135552e-05,
                              -0.0002901358214053897, 0.0002944262405490704, 0.0017556055603028793,
                              -0.009746819792790901, 0.028362285509051358, -0.05869335274013941,
                              0.09230431965605784, -0.10880393454620606, 0.08227673860881943,
                              0.003585415648876794, -0.14024059858819599, 1.237512630836828);
  return p / (1.0 + 2.0 * z);
}

JAXFP8_HD double Relu(double x) { return x < 0.0 ? 0.0 : x; }  // NaN is not below 0

// 1 / (1 + e^-x), and exactly 0 where that is below every float32: -inf times it is then NaN, as it
// is in JAX.
JAXFP8_HD double Logistic(double x) { return x < -700.0 ? 0.0 : 1.0 / (1.0 + Exp(-x)); }

JAXFP8_HD double Silu(double x) { return x * Logistic(x); }

JAXFP8_HD double GeluTanh(double x) {
  constexpr double kTwiceSqrtTwoOverPi = 1.5957691216057308;
  const double u = kTwiceSqrtTwoOverPi * (x + 0.044715 * x * x * x);
  return x * Logistic(u);
}

JAXFP8_HD double GeluErf(double x) {
  const double scaled = x * 0.7071067811865476;
  const double z = scaled < 0.0 ? -scaled : scaled;
  // Above 26, e^(-z^2) is below every float32. The bound keeps infinity out of the polynomial.
  const double bounded = z > 26.0 ? 26.0 : z;
  const double tail = z > 26.0 ? 0.0 : 0.5 * Exp(-bounded * bounded) * ScaledErfc(bounded);
  return x * (x < 0.0 ? tail : 1.0 - tail);
}

JAXFP8_HD double Apply(Activation activation, double x) {
#define JAXFP8_APPLY(Name, text) \
  case Activation::k##Name:      \
    return Name(x);
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
