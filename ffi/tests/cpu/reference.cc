#include "tests/cpu/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/decode.h"

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

double Value(const Array& array, int64_t i) {
  switch (array.dtype()) {
    case DType::kF32:
      return array.as<float>()[i];
    case DType::kS32:
      return array.as<int32_t>()[i];
    case DType::kBF16:
      return DecodeBF16(array.as<uint16_t>()[i]);
    case DType::kF16:
      return DecodeF16(array.as<uint16_t>()[i]);
    default:
      return DecodedCode(array.dtype(), array.data()[i]);
  }
}

Shape Strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// For each index over axes of `sizes`, the last fastest: the sum of index * stride.
std::vector<int64_t> Offsets(const Shape& sizes, const Shape& strides) {
  std::vector<int64_t> offsets = {0};
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    std::vector<int64_t> next;
    for (int64_t offset : offsets) {
      for (int64_t i = 0; i < sizes[axis]; ++i) next.push_back(offset + i * strides[axis]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

// Along chosen axes of an array; an axis of size 1 stands still, whatever `sizes` says.
std::vector<int64_t> Along(const Shape& shape, const Shape& axes, const Shape& sizes) {
  const Shape all = Strides(shape);
  Shape strides;
  for (int64_t axis : axes) strides.push_back(shape[axis] == 1 ? 0 : all[axis]);
  return Offsets(sizes, strides);
}

Shape Sizes(const SideCase& side, const Shape& axes) {
  Shape sizes;
  for (int64_t axis : axes) sizes.push_back(side.shape[axis]);
  return sizes;
}

std::vector<double> Dequantized(const SideCase& side, const Array& values, const Array& scale,
                                const Array& zero_point) {
  const Shape strides = Strides(side.shape), of_tiles = Strides(side.ScaleShape());
  const bool factors = side.scale || side.zero_point;
  std::vector<double> out(values.count());
  for (int64_t i = 0; i < values.count(); ++i) {
    int64_t tile = 0;
    for (size_t axis = 0; factors && axis < side.shape.size(); ++axis) {
      tile += i / strides[axis] % side.shape[axis] / side.tiles[axis] * of_tiles[axis];
    }
    const double zero = side.zero_point ? Value(zero_point, tile) : 0.0;
    out[i] = (Value(values, i) - zero) * (side.scale ? Value(scale, tile) : 1.0);
  }
  return out;
}

// A plane's value for each output element; `none` without the plane.
std::vector<double> Spread(const Array& plane, const std::optional<Shape>& shape, const Shape& out,
                           double none) {
  if (!shape) return std::vector<double>(CountOf(out), none);
  Shape axes(out.size());
  for (size_t i = 0; i < axes.size(); ++i) axes[i] = static_cast<int64_t>(i);
  std::vector<double> spread;
  for (int64_t offset : Along(*shape, axes, out)) spread.push_back(Value(plane, offset));
  return spread;
}

struct Activated {
  double y, slope;  // `slope` bounds how much the function enlarges an error
};

Activated Activate(const std::string& activation, double x) {
  if (activation == "relu") return {x < 0 ? 0.0 : x, 1.0};
  if (activation == "silu") return {x / (1 + std::exp(-x)), 1.1};
  if (activation == "gelu_erf") return {0.5 * x * std::erfc(-x * std::sqrt(0.5)), 1.13};
  if (activation == "gelu_tanh") {
    const double u = std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
    return {x / (1 + std::exp(-2 * u)), 1.13};
  }
  return {x, 1.0};
}

// All finite codes of an 8-bit type by value; of the two zeros the positive.
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

// The nearest value of an 8-bit type, ties to the even code, saturated.
double Rounded(DType dtype, double value) {
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

bool CloseWide(DType dtype, double found, double y, double error) {
  if (std::isnan(y)) return std::isnan(found);
  if (std::isnan(found)) return false;
  if (found == y) return true;
  if (std::isinf(y)) return false;
  if (std::isinf(found)) return std::abs(y) + error >= FormatOf(dtype).highest;
  const double bound = error + HalfUlp(dtype, y) + HalfUlp(dtype, std::abs(y) + error);
  return std::abs(found - y) <= bound;
}

bool CloseCode(DType dtype, double found, double y, double error, double scale) {
  if (std::isnan(y / scale)) return IsInt8(dtype) ? found == 0 : std::isnan(found);
  if (std::isnan(found)) return false;
  const double a = Rounded(dtype, (y - error) / scale), b = Rounded(dtype, (y + error) / scale);
  return std::min(a, b) <= found && found <= std::max(a, b);
}

bool Close(DType dtype, double found, double y, double error, double scale) {
  if (dtype == DType::kS32) return found == y;
  if (IsEightBit(dtype)) return CloseCode(dtype, found, y, error, scale);
  return CloseWide(dtype, found, y, error);
}

std::string Sentence(const char* name, int64_t i, double found, double y, double error) {
  char text[160];
  std::snprintf(text, sizeof text, "%s[%lld] is %.9g, but needs %.9g within %.3g", name,
                static_cast<long long>(i), found, y, error);
  return text;
}

// The largest |y| of the output elements that share one amax, and what the largest of them may be
// off by.
std::string WhyWrongAmax(const Case& from, const Exact& exact, const Array& amax) {
  Shape axes;
  for (size_t i = 0; i < from.amax->size(); ++i) axes.push_back(static_cast<int64_t>(i));
  const std::vector<int64_t> offsets = Along(*from.amax, axes, from.OutShape());
  std::vector<double> largest(amax.count(), 0.0);
  double error = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    double& seen = largest[offsets[i]];
    const double y = std::abs(exact.y[i]);
    if (y > seen || std::isnan(y)) seen = std::isnan(seen) ? seen : y;
    if (std::isfinite(exact.error[i])) error = std::max(error, exact.error[i]);
  }
  for (int64_t i = 0; i < amax.count(); ++i) {
    const double found = Value(amax, i);
    if (!CloseWide(DType::kF32, found, largest[i], error)) {
      return Sentence("amax", i, found, largest[i], error);
    }
  }
  return "";
}

}  // namespace

double DecodedCode(DType dtype, uint8_t code) {
  static const auto e4m3 = [] {
    std::array<double, 256> all;
    for (int i = 0; i < 256; ++i) all[i] = DecodedFloat8(DType::kE4M3, static_cast<uint8_t>(i));
    return all;
  }();
  static const auto e5m2 = [] {
    std::array<double, 256> all;
    for (int i = 0; i < 256; ++i) all[i] = DecodedFloat8(DType::kE5M2, static_cast<uint8_t>(i));
    return all;
  }();
  if (dtype == DType::kE4M3) return e4m3[code];
  if (dtype == DType::kE5M2) return e5m2[code];
  return dtype == DType::kS8 ? static_cast<int8_t>(code) : code;
}

Exact Compute(const Case& from, const Operands& operands) {
  const SideCase &lhs = from.lhs, &rhs = from.rhs;
  const Shape out = from.OutShape();
  const Shape batch(out.begin(), out.begin() + static_cast<int64_t>(lhs.batch.size()));
  const Shape rows = Sizes(lhs, lhs.Free()), columns = Sizes(rhs, rhs.Free());
  const Shape depth = Sizes(lhs, lhs.contracting);
  const auto left = Dequantized(lhs, operands.lhs, operands.lhs_scale, operands.lhs_zero_point);
  const auto right = Dequantized(rhs, operands.rhs, operands.rhs_scale, operands.rhs_zero_point);
  const auto left_batch = Along(lhs.shape, lhs.batch, batch);
  const auto right_batch = Along(rhs.shape, rhs.batch, batch);
  const auto left_rows = Along(lhs.shape, lhs.Free(), rows);
  const auto right_columns = Along(rhs.shape, rhs.Free(), columns);
  const auto left_depth = Along(lhs.shape, lhs.contracting, depth);
  const auto right_depth = Along(rhs.shape, rhs.contracting, depth);
  const auto residual = Spread(operands.residual, from.residual, out, 0.0);
  const auto bias = Spread(operands.bias, from.bias, out, 0.0);
  const double terms = std::max<double>(static_cast<double>(left_depth.size()), 1) +
                       from.residual.has_value() + from.bias.has_value();
  Exact exact;
  exact.out_scale = Spread(operands.out_scale, from.out_scale, out, 1.0);
  for (size_t b = 0; b < left_batch.size(); ++b) {
    for (int64_t row : left_rows) {
      for (int64_t column : right_columns) {
        const double* l = left.data() + left_batch[b] + row;
        const double* r = right.data() + right_batch[b] + column;
        double sum = 0, magnitude = 0;
        for (size_t k = 0; k < left_depth.size(); ++k) {
          const double product = l[left_depth[k]] * r[right_depth[k]];
          sum += product;
          magnitude += std::abs(product);
        }
        const size_t i = exact.y.size();
        sum += residual[i] + bias[i];
        magnitude += std::abs(residual[i]) + std::abs(bias[i]);
        const Activated done = Activate(from.activation, sum);
        // An activation may itself be off by a few units of its argument's last place.
        const double slack = done.slope > 1 ? 8 * 0x1p-24 * std::abs(sum) : 0.0;
        exact.y.push_back(done.y);
        exact.error.push_back(terms * 0x1p-24 * magnitude * done.slope + slack);
      }
    }
  }
  return exact;
}

std::string WhyWrong(const Case& from, const Exact& exact, const Results& results) {
  for (int64_t i = 0; i < results.out.count(); ++i) {
    const double found = Value(results.out, i);
    const double error = std::isfinite(exact.error[i]) ? exact.error[i] : 0.0;
    if (!Close(from.out_dtype, found, exact.y[i], error, exact.out_scale[i])) {
      return Sentence("out", i, found, exact.y[i] / exact.out_scale[i], error / exact.out_scale[i]);
    }
  }
  return from.amax ? WhyWrongAmax(from, exact, results.amax) : "";
}

}  // namespace jaxfp8::tests
