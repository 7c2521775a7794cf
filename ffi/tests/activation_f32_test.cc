// The float32 activations agree with the float64 ones, for floats of every exponent.

#include "common/activation_f32.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "common/decode.h"

namespace {

using jaxfp8::Activation;

constexpr double kSmallest = 1e-36;  // below, the error bound is absolute

// The argument of the exponential, whose rounding affects the result.
double Argument(Activation activation, double x) {
  return activation == Activation::kGeluTanh ? 1.5957691216 * (x + 0.044715 * x * x * x) : 0.0;
}

void Check(Activation activation, float x, double& worst) {
  const double exact = jaxfp8::Apply(activation, static_cast<double>(x));
  const double got = jaxfp8::ApplyF32(activation, x);
  if (std::isnan(exact) != std::isnan(got)) {
    std::printf("activation %d of %g is %g, not %g\n", static_cast<int>(activation), x, got, exact);
    std::exit(1);
  }
  if (std::isnan(exact) || exact == got) return;
  const double t = std::fmin(std::fabs(Argument(activation, x)), 104.0);
  const double ulps = std::fabs(got - exact) / (0x1p-23 * std::fabs(exact) + kSmallest);
  worst = std::fmax(worst, ulps - 1.5 * t);
  if (!(ulps <= 4 + 1.5 * t)) {
    std::printf("activation %d of %.9g is %.9g, not %.9g: %g ulp\n", static_cast<int>(activation),
                x, got, exact, ulps);
    std::exit(1);
  }
}

}  // namespace

int main() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (Activation activation : {Activation::kNone, Activation::kRelu, Activation::kGeluTanh,
                                Activation::kGeluErf, Activation::kSilu}) {
    double worst = 0;
    for (uint32_t bits = 0; bits < 0x7f800000u; bits += 4099) {
      Check(activation, jaxfp8::FloatFromBits(bits), worst);
      Check(activation, -jaxfp8::FloatFromBits(bits), worst);
    }
    for (float x = -20.0f; x < 20.0f; x += 0x1p-13f) Check(activation, x, worst);
    for (float x : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      Check(activation, x, worst);
    }
    std::printf("activation %d: %.2f ulp\n", static_cast<int>(activation), worst);
  }
}
