#include "tests/cpu/formats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace jaxfp8::tests {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A float type by its fields.
struct Format {
  int mantissa, bias;
  double highest;
};

Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
      return {3, 7, 448.0};
    case DType::kE5M2:
      return {2, 15, 57344.0};
    case DType::kF16:
      return {10, 15, 65504.0};
    case DType::kBF16:
      return {7, 127, 0x1.fep127};
    default:
      return {23, 127, 0x1.fffffep127};
  }
}

double DecodedFloat8(DType dtype, uint8_t code) {
  const Format format = FormatOf(dtype);
  const int magnitude = code & 0x7f;
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (dtype == DType::kE4M3 && magnitude == 0x7f) return kNaN;
  if (dtype == DType::kE5M2 && magnitude > 0x7c) return kNaN;
  if (dtype == DType::kE5M2 && magnitude == 0x7c) return sign * kInfinity;
  const int exponent = magnitude >> format.mantissa;
  const int field = magnitude & ((1 << format.mantissa) - 1);
  const int whole = exponent ? field + (1 << format.mantissa) : field;
  return sign * std::ldexp(whole, std::max(exponent, 1) - format.bias - format.mantissa);
}

std::array<double, 256> AllCodes(DType dtype) {
  std::array<double, 256> all;
  for (int i = 0; i < 256; ++i) all[i] = DecodedFloat8(dtype, static_cast<uint8_t>(i));
  return all;
}

// All finite codes of an FP8 type by value; of the two zeros the positive.
std::vector<std::pair<double, uint8_t>> Sorted(DType dtype) {
  std::vector<std::pair<double, uint8_t>> codes;
  for (int code = 0; code < 256; ++code) {
    const double value = DecodedCode(dtype, static_cast<uint8_t>(code));
    const bool negative_zero = value == 0 && std::signbit(value);
    if (std::isfinite(value) && !negative_zero) codes.push_back({value, code});
  }
  std::sort(codes.begin(), codes.end());
  return codes;
}

}  // namespace

double DecodedCode(DType dtype, uint8_t code) {
  static const auto e4m3 = AllCodes(DType::kE4M3), e5m2 = AllCodes(DType::kE5M2);
  if (dtype == DType::kE4M3) return e4m3[code];
  if (dtype == DType::kE5M2) return e5m2[code];
  return dtype == DType::kS8 ? static_cast<int8_t>(code) : code;
}

double HighestOf(DType dtype) { return FormatOf(dtype).highest; }

double RoundedTo(DType dtype, double value) {
  if (IsInt8(dtype)) {
    const double low = dtype == DType::kS8 ? -128 : 0;
    return std::nearbyint(std::clamp(value, low, low + 255));
  }
  static const auto e4m3 = Sorted(DType::kE4M3), e5m2 = Sorted(DType::kE5M2);
  const auto& codes = dtype == DType::kE4M3 ? e4m3 : e5m2;
  const double clamped = std::clamp(value, codes.front().first, codes.back().first);
  const auto above = std::lower_bound(codes.begin(), codes.end(), std::pair(clamped, uint8_t{0}));
  if (above == codes.begin() || above->first == clamped) return above->first;
  const auto below = above - 1;
  const double down = clamped - below->first, up = above->first - clamped;
  if (down == up) return below->second % 2 == 0 ? below->first : above->first;
  return down < up ? below->first : above->first;
}

double HalfUlp(DType dtype, double y) {
  const Format format = FormatOf(dtype);
  const double magnitude = std::max(std::abs(y), std::ldexp(1.0, 1 - format.bias));
  return std::ldexp(0.5, std::ilogb(magnitude) - format.mantissa);
}

}  // namespace jaxfp8::tests
