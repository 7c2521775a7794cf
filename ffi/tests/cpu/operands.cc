#include "tests/cpu/operands.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cpu/formats.h"

namespace jaxfp8::tests {
namespace {

double Uniform(Random& random, double low, double high) {
  return low + (high - low) * 0x1p-53 * static_cast<double>(random() >> 11);
}

std::vector<uint8_t> FiniteCodes(DType dtype) {
  std::vector<uint8_t> codes;
  for (int code = 0; code < 256; ++code) {
    if (std::isfinite(DecodedCode(dtype, static_cast<uint8_t>(code)))) codes.push_back(code);
  }
  return codes;
}

void DrawCodes(const Array& array, Values values, Random& random) {
  const std::vector<uint8_t> finite = FiniteCodes(array.dtype());
  for (int64_t i = 0; i < array.count(); i += 8) {
    uint64_t bits = random();
    for (int64_t j = i; j < std::min(i + 8, array.count()); ++j, bits >>= 8) {
      array.data()[j] = finite[(bits & 255) * finite.size() / 256];
    }
  }
  if (values == Values::kFinite) return;
  for (int64_t i = Below(random, 100); i < array.count(); i += 1 + Below(random, 200)) {
    array.data()[i] = static_cast<uint8_t>(random());
  }
}

double DrawWide(Values values, Random& random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (values == Values::kSpecial && Below(random, 40) == 0) {
    const double special[] = {kInfinity, -kInfinity, std::nan(""), 0.0, -0.0};
    return special[Below(random, 5)];
  }
  return Uniform(random, -2.0, 2.0);
}

void DrawSide(const Array& array, Values values, Random& random) {
  if (IsEightBit(array.dtype())) return DrawCodes(array, values, random);
  for (int64_t i = 0; i < array.count(); ++i) Put(array, i, DrawWide(values, random));
}

void DrawScales(const Array& array, double factor, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) {
    Put(array, i, factor * std::exp2(Uniform(random, -3, 3)));
  }
}

void DrawZeroPoints(const Array& array, DType dtype, Random& random) {
  const int64_t low = dtype == DType::kS8 ? -128 : 0;
  for (int64_t i = 0; i < array.count(); ++i) {
    const auto zero = static_cast<int32_t>(low + Below(random, 256));
    if (array.dtype() == DType::kS32) {
      array.as<int32_t>()[i] = zero;
    } else {
      array.data()[i] = static_cast<uint8_t>(zero);
    }
  }
}

void DrawPlane(const Array& array, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) Put(array, i, Uniform(random, -2, 2));
}

Array Given(bool given, DType dtype, const Shape& shape, int64_t shift = 0) {
  return given ? Array(dtype, shape, shift) : Array();
}

}  // namespace

int64_t Below(Random& random, int64_t end) {
  return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
}

Operands DrawOperands(const Case& from, Values values, Random& random) {
  // Half of the cases start at an odd place: one element after that of the allocator.
  const int64_t odd = Below(random, 2);
  Operands to;
  to.lhs = Array(from.lhs.dtype, from.lhs.shape, odd * SizeOf(from.lhs.dtype));
  to.rhs = Array(from.rhs.dtype, from.rhs.shape, odd * SizeOf(from.rhs.dtype));
  DrawSide(to.lhs, values, random);
  DrawSide(to.rhs, values, random);
  to.lhs_scale = Given(from.lhs.scale, from.lhs.scale_type, from.lhs.ScaleShape(), 4 * odd);
  to.rhs_scale = Given(from.rhs.scale, from.rhs.scale_type, from.rhs.ScaleShape(), 4 * odd);
  DrawScales(to.lhs_scale, 1.0, random);
  DrawScales(to.rhs_scale, 1.0, random);
  to.lhs_zero_point = Given(from.lhs.zero_point, from.lhs.zero_type, from.lhs.ScaleShape());
  to.rhs_zero_point = Given(from.rhs.zero_point, from.rhs.zero_type, from.rhs.ScaleShape());
  DrawZeroPoints(to.lhs_zero_point, from.lhs.dtype, random);
  DrawZeroPoints(to.rhs_zero_point, from.rhs.dtype, random);
  const auto plane = [](const std::optional<Shape>& shape, DType dtype) {
    return shape ? Array(dtype, *shape) : Array();
  };
  to.residual = plane(from.residual, from.residual_dtype);
  to.bias = plane(from.bias, from.bias_dtype);
  to.out_scale = plane(from.out_scale, DType::kF32);
  DrawPlane(to.residual, random);
  DrawPlane(to.bias, random);
  DrawScales(to.out_scale, 0.3, random);
  return to;
}

void FillFrom(const Array& array, const std::vector<double>& list, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) {
    Put(array, i, list[Below(random, static_cast<int64_t>(list.size()))]);
  }
}

void MakeAtMostOne(const Array& scale) {
  double largest = 0;
  for (int64_t i = 0; i < scale.count(); ++i) largest = std::max(largest, ValueOf(scale, i));
  for (int64_t i = 0; i < scale.count(); ++i) Put(scale, i, ValueOf(scale, i) / largest);
}

Array As(DType dtype, const Array& from) {
  Array to(dtype, {from.count()});
  for (int64_t i = 0; i < from.count(); ++i) Put(to, i, ValueOf(from, i));
  return to;
}

Results SoiledResults(const Case& from) {
  Results to;
  to.out = Array(from.out_dtype, from.OutShape());
  if (from.amax) to.amax = Array(DType::kF32, *from.amax);
  for (const Array* array : {&to.out, &to.amax}) {
    if (array->data()) std::memset(array->data(), 0xa5, array->bytes());
  }
  return to;
}

}  // namespace jaxfp8::tests
