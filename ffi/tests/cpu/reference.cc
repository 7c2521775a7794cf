#include "tests/cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/decode.h"
#include "common/encode.h"
#include "tests/cpu/offsets.h"

namespace jaxfp8::tests {
namespace {

double ScaleAt(const SideCase& side, const Array& scale, int64_t tile) {
  if (!side.scale) return 1.0;
  const double value = ValueOf(scale, tile);
  return side.scale_rounded ? DecodeBF16(EncodeBF16(static_cast<float>(value))) : value;
}

// The tile of each value, axis by axis: those of a longer prefix of the axes from a shorter one's.
std::vector<int64_t> TileOfEach(const SideCase& side) {
  const Shape strides = Strides(side.ScaleShape());
  std::vector<int64_t> tiles = {0};
  for (size_t axis = 0; axis < side.shape.size(); ++axis) {
    std::vector<int64_t> next;
    next.reserve(tiles.size() * side.shape[axis]);
    for (int64_t before : tiles) {
      for (int64_t i = 0; i < side.shape[axis]; ++i) {
        next.push_back(before + i / side.tiles[axis] * strides[axis]);
      }
    }
    tiles = std::move(next);
  }
  return tiles;
}

std::vector<double> Dequantized(const SideCase& side, const Array& values, const Array& scale,
                                const Array& zero_point) {
  const bool factors = side.scale || side.zero_point;
  const std::vector<int64_t> tiles = factors ? TileOfEach(side) : std::vector<int64_t>();
  std::vector<double> out(values.count());
  for (int64_t i = 0; i < values.count(); ++i) {
    const int64_t tile = factors ? tiles[i] : 0;
    const double zero = side.zero_point ? ValueOf(zero_point, tile) : 0.0;
    out[i] = (ValueOf(values, i) - zero) * ScaleAt(side, scale, tile);
  }
  return out;
}

// Lines of a side one after the other, each contiguous along the depth.
std::vector<double> Lines(const std::vector<double>& values, int64_t batch,
                          const std::vector<int64_t>& lines, const std::vector<int64_t>& depth) {
  std::vector<double> out;
  out.reserve(lines.size() * depth.size());
  for (int64_t line : lines) {
    for (int64_t k : depth) out.push_back(values[batch + line + k]);
  }
  return out;
}

// A plane's value for each output element; `none` without the plane.
std::vector<double> Spread(const Array& plane, const std::optional<Shape>& shape, const Shape& out,
                           double none) {
  if (!shape) return std::vector<double>(CountOf(out), none);
  std::vector<double> spread;
  for (int64_t offset : Along(*shape, AllAxes(out), out)) spread.push_back(ValueOf(plane, offset));
  return spread;
}

struct Sum {
  double value, magnitude;
};

Sum Dot(const double* left, const double* right, int64_t depth) {
  constexpr int kLanes = 8;  // that the compiler turns to vectors
  double value[kLanes] = {}, magnitude[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double product = left[k + lane] * right[k + lane];
      value[lane] += product;
      magnitude[lane] += std::abs(product);
    }
  }
  for (; k < depth; ++k) {
    value[0] += left[k] * right[k];
    magnitude[0] += std::abs(left[k] * right[k]);
  }
  Sum sum{};
  for (int lane = 0; lane < kLanes; ++lane) {
    sum.value += value[lane];
    sum.magnitude += magnitude[lane];
  }
  return sum;
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

}  // namespace

Exact Compute(const Case& from, const Operands& operands) {
  const SideCase &lhs = from.lhs, &rhs = from.rhs;
  const Shape out = from.OutShape();
  const Shape batch(out.begin(), out.begin() + static_cast<int64_t>(lhs.batch.size()));
  const Shape depth = SizesOf(lhs.shape, lhs.contracting);
  const auto left = Dequantized(lhs, operands.lhs, operands.lhs_scale, operands.lhs_zero_point);
  const auto right = Dequantized(rhs, operands.rhs, operands.rhs_scale, operands.rhs_zero_point);
  const auto left_batch = Along(lhs.shape, lhs.batch, batch);
  const auto right_batch = Along(rhs.shape, rhs.batch, batch);
  const auto left_rows = Along(lhs.shape, lhs.Free(), SizesOf(lhs.shape, lhs.Free()));
  const auto right_columns = Along(rhs.shape, rhs.Free(), SizesOf(rhs.shape, rhs.Free()));
  const auto left_depth = Along(lhs.shape, lhs.contracting, depth);
  const auto right_depth = Along(rhs.shape, rhs.contracting, depth);
  const auto residual = Spread(operands.residual, from.residual, out, 0.0);
  const auto bias = Spread(operands.bias, from.bias, out, 0.0);
  const auto k = static_cast<int64_t>(left_depth.size());
  const double terms = static_cast<double>(std::max<int64_t>(k, 1) + from.residual.has_value() +
                                           from.bias.has_value());
  Exact exact;
  exact.out_scale = Spread(operands.out_scale, from.out_scale, out, 1.0);
  for (size_t b = 0; b < left_batch.size(); ++b) {
    const auto rows = Lines(left, left_batch[b], left_rows, left_depth);
    const auto columns = Lines(right, right_batch[b], right_columns, right_depth);
    for (size_t row = 0; row < left_rows.size(); ++row) {
      for (size_t column = 0; column < right_columns.size(); ++column) {
        Sum sum = Dot(rows.data() + row * k, columns.data() + column * k, k);
        const size_t i = exact.y.size();
        sum.value += residual[i] + bias[i];
        sum.magnitude += std::abs(residual[i]) + std::abs(bias[i]);
        const Activated done = Activate(from.activation, sum.value);
        // An activation may itself be off by a few units of its argument's last place.
        const double slack = done.slope > 1 ? 8 * 0x1p-24 * std::abs(sum.value) : 0.0;
        exact.y.push_back(done.y);
        exact.error.push_back(terms * 0x1p-24 * sum.magnitude * done.slope + slack);
      }
    }
  }
  return exact;
}

}  // namespace jaxfp8::tests
