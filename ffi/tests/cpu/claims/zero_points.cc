// Integer products with zero points are exact, however far away these are.

#include <algorithm>

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

// A weight [K, N] as `jaxfp8.prepare` lays it out.
Array AsPrepared(const Array& weight, int64_t depth, int64_t columns) {
  Array to(weight.dtype(), {depth * columns});
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < columns; ++n) {
      const int64_t block = n / 64 * depth * 64;
      to.data()[block + k / 4 * 256 + n % 64 * 4 + k % 4] = weight.data()[k * columns + n];
    }
  }
  return to;
}

}  // namespace

// Values whose differences from it fit a byte, and some far away.
CLAIM(ZeroPointsOfFewRowsAreExact) {
  constexpr int64_t k = 4103, n = 70;
  for (DType dtype : {DType::kS8, DType::kU8}) {
    const int64_t low = dtype == DType::kS8 ? -128 : 0, high = low + 255;
    for (int64_t zero : {-65533, -4000, -128, -3, 0, 7, 127, 128, 255, 300, 65539}) {
      for (int64_t rows : {1, 2, 3, 4}) {
        Case of = Matrices(dtype, DType::kS8, {rows, k, n}, kAcross);
        of.lhs.zero_point = of.rhs.zero_point = true;
        of.lhs.tiles = {1, k};
        of.out_dtype = DType::kS32;
        if (!harness.Begin(of.Text() + ", zero point " + std::to_string(zero))) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        const int64_t middle = std::clamp(zero, low + 40, high - 40);
        for (int64_t i = 0; i < rows * k; ++i) {
          Put(operands.lhs, i, static_cast<double>(middle - 40 + Below(harness.random(), 80)));
        }
        for (int i = 0; i < 20; ++i) {
          const int64_t at = Below(harness.random(), rows * k);
          Put(operands.lhs, at, static_cast<double>(i % 2 ? low : high));
        }
        for (int64_t row = 0; row < rows; ++row) {
          operands.lhs_zero_point.as<int32_t>()[row] = row == 2 ? 0 : static_cast<int32_t>(zero);
        }
        operands.rhs_zero_point.as<int32_t>()[0] = -5;
        harness.CheckExact(of, operands);
      }
    }
  }
}

// A difference of 255 fits where one of 256 does not. Extreme codes make sums as large as they get.
CLAIM(ZeroPointsThatAreNearOrJustBeyondAreExact) {
  constexpr int64_t k = 4104, n = 64;
  for (int64_t beyond : {255, 256}) {
    for (int64_t rows : {1, 3, 7, 40}) {
      for (const char* layout : {"across", "along", "prepared"}) {
        const bool prepared = layout == std::string("prepared");
        const bool along = layout == std::string("along");
        Case of = prepared ? Prepared(DType::kU8, DType::kS8, {rows, k, n})
                           : Matrices(DType::kU8, DType::kS8, {rows, k, n}, along ? kAlong : 0);
        of.lhs.zero_point = of.rhs.zero_point = true;
        of.lhs.tiles = of.lhs.shape;
        of.lhs.tiles[0] = 1;
        of.out_dtype = DType::kS32;
        const std::string zero = std::to_string(beyond);
        if (!harness.Begin(of.Text() + ", " + zero, Cost::kLarge)) continue;
        Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        const auto far = static_cast<double>(beyond);
        FillFrom(operands.lhs, {0, 255}, harness.random());
        FillFrom(operands.rhs, {-128, 127}, harness.random());
        if (prepared) operands.rhs = AsPrepared(operands.rhs, k, n);
        FillFrom(operands.lhs_zero_point, {-far, far, 0}, harness.random());
        Put(operands.lhs_zero_point, 0, -far);
        Fill(operands.rhs_zero_point, -5);
        harness.CheckExact(of, operands);
      }
    }
  }
}

// More columns than few rows are multiplied with at once, whose sums the zero points need.
CLAIM(ZeroPointsOfVeryManyColumnsAreExact) {
  for (int64_t rows : {1, 4}) {
    Case of = Matrices(DType::kS8, DType::kS8, {rows, 803, 17'063}, kAcross);
    of.lhs.zero_point = of.rhs.zero_point = true;
    of.rhs.tiles = {803, 1};
    of.out_dtype = DType::kS32;
    if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
    const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
    if (rows == 1) {  // so that differences fit a byte
      for (int64_t i = 0; i < operands.lhs.count(); ++i) {
        Put(operands.lhs, i, std::clamp(ValueOf(operands.lhs, i), -60.0, 60.0));
      }
      Fill(operands.lhs_zero_point, 3);
    }
    harness.CheckExact(of, operands);
  }
}

}  // namespace jaxfp8::tests
