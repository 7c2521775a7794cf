// NaN, infinities and zeros of either sign behave as in IEEE 754.

#include <cmath>
#include <limits>

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

// Also an infinity times a zero of either sign, which is NaN.
CLAIM(NaNAndInfinitySpreadAsInIeee) {
  for (DType wide : kWide) {
    for (int layout : kWeightLayouts) {
      for (int64_t rows : {5, 33}) {
        const int64_t k = 19, n = 70;
        const Case of = Matrices(wide, DType::kE5M2, {rows, k, n}, layout);
        if (!harness.Begin(of.Text())) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        const auto put = [&](int64_t row, int64_t column, double value) {
          Put(operands.rhs, layout == kAlong ? column * k + row : row * n + column, value);
        };
        Fill(operands.lhs, 1);
        Fill(operands.rhs, 1);
        Put(operands.lhs, k + 3, NAN);
        Put(operands.lhs, 2 * k + 18, kInfinity);
        Put(operands.lhs, 3 * k, kInfinity), Put(operands.lhs, 3 * k + 1, -kInfinity);
        Put(operands.lhs, 4 * k + 17, -kInfinity);
        put(0, 5, NAN), put(18, 6, 0.0), put(17, 7, -0.0);
        harness.CheckExact(of, operands);
      }
    }
  }
}

// Depth and columns that fill no vector are padded. An infinity times the padding would be NaN.
CLAIM(PaddingNeverMeetsAnInfinity) {
  for (const Sizes& sizes : {Sizes{2, 1, 1}, Sizes{2, 3, 65}, Sizes{2, 17, 63}, Sizes{9, 17, 63}}) {
    for (int layout = 0; layout < kLayouts; ++layout) {
      const Case of = Matrices(DType::kBF16, DType::kS8, sizes, layout);
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      Fill(operands.lhs, kInfinity);
      Fill(operands.rhs, 1);
      harness.CheckExact(of, operands);
    }
  }
}

// Zeros of either sign on either side: every product is a zero, and no sum is anything else.
CLAIM(ZerosOfEitherSignAreZero) {
  for (DType coded : {DType::kE4M3, DType::kE5M2}) {
    for (DType other : {DType::kE4M3, DType::kE5M2, DType::kBF16, DType::kF32, DType::kF16}) {
      const Case of = Matrices(other, coded, {6, 70, 67}, kAcross);
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      FillFrom(operands.lhs, {0.0, -0.0}, harness.random());
      harness.CheckExact(of, operands);
      const Operands swapped = DrawOperands(of, Values::kFinite, harness.random());
      FillFrom(swapped.rhs, {0.0, -0.0}, harness.random());
      harness.CheckExact(of, swapped);
    }
  }
}

}  // namespace jaxfp8::tests
