#include "cpu/problem.h"

#include <algorithm>
#include <utility>

#include "common/decode.h"
#include "common/encode.h"
#include "common/shapes.h"
#include "cpu/axes.h"

namespace jaxfp8 {
namespace {

void Fill(const std::vector<Digit>& digits, size_t level, int64_t offset, int64_t*& next) {
  const Digit& digit = digits[level];
  const bool innermost = level + 1 == digits.size();
  for (int64_t start = 0; start < digit.size; start += digit.tile, offset += digit.stride) {
    const int64_t count = std::min(digit.tile, digit.size - start);
    if (innermost) {
      next = std::fill_n(next, count, offset);
    } else {
      for (int64_t i = 0; i < count; ++i) Fill(digits, level + 1, offset, next);
    }
  }
}

// `Offsets::run` of the table of these digits.
int64_t RunOf(const std::vector<Digit>& digits) {
  const Digit& last = digits.back();
  const int64_t run = std::max<int64_t>(last.stride == 0 ? last.size : last.tile, 1);
  return digits.size() == 1 || last.size % run == 0 ? run : 1;
}

// An empty group has no offsets and no table, however large its other axes are.
Offsets MakeOffsets(const std::vector<Digit>& digits, Tables& tables) {
  if (digits.empty()) return {};
  if (digits.size() == 1 && digits[0].tile == 1) return {nullptr, digits[0].stride};
  int64_t size = 1;
  for (const Digit& digit : digits) size *= digit.size;
  if (size == 0) return {};
  tables.push_back(std::make_unique<int64_t[]>(size));
  int64_t* next = tables.back().get();
  Fill(digits, 0, 0, next);
  return {tables.back().get(), 0, RunOf(digits)};
}

Operand MakeOperand(const OperandSpec& spec, const OperandAxes& axes, Tables& tables) {
  Operand side;
  side.dtype = ParseDType(spec.dtype);
  side.batch = MakeOffsets(axes.batch, tables);
  side.free = MakeOffsets(axes.free, tables);
  side.depth = MakeOffsets(axes.depth, tables);
  side.scales = axes.tiles;
  side.scale_rounded = spec.scale_rounded;
  side.tile_batch = MakeOffsets(axes.tile_batch, tables);
  side.tile_free = MakeOffsets(axes.tile_free, tables);
  side.tile_depth = MakeOffsets(axes.tile_depth, tables);
  return side;
}

EpilogueArray MakeArray(bool given, void* data, DType dtype, Dims shape, const AxisGroups& groups,
                        Tables& tables) {
  if (!given) return {};
  const AxisArray array(shape, {}, &Axis::out);
  const auto along = [&](const std::vector<Axis>& group) {
    return MakeOffsets(array.Digits(group), tables);
  };
  return {data, dtype, along(groups.batch), along(groups.rows), along(groups.columns)};
}

Epilogue MakeEpilogue(const ScaledDotSpec& spec, const Buffers& buffers, const AxisGroups& groups,
                      Tables& tables) {
  const EpilogueSpec& from = spec.epilogue;
  Epilogue to;
  to.activation = ParseActivation(from.activation);
  to.residual = MakeArray(from.has_residual, buffers.residual, ParseDType(from.residual_dtype),
                          from.residual, groups, tables);
  to.bias = MakeArray(from.has_bias, buffers.bias, buffers.bias_type, from.bias, groups, tables);
  to.out_scale =
      MakeArray(from.has_out_scale, buffers.out_scale, DType::kF32, from.out_scale, groups, tables);
  to.amax = MakeArray(from.has_amax, buffers.amax, DType::kF32, from.amax, groups, tables);
  to.out = MakeArray(true, buffers.out, ParseDType(from.out_dtype), OutShape(spec), groups, tables);
  return to;
}

void Swap(CanonicalDot& problem) {
  std::swap(problem.rows, problem.columns);
  std::swap(problem.lhs, problem.rhs);
  Epilogue& epilogue = problem.epilogue;
  for (EpilogueArray* plane :
       {&epilogue.residual, &epilogue.bias, &epilogue.out_scale, &epilogue.amax, &epilogue.out}) {
    std::swap(plane->rows, plane->columns);
  }
}

bool Scaled(const Operand& side) { return side.scale || side.zero_point; }

// The start of `side`'s next tile after depth k, or the end.
int64_t NextTile(const Operand& side, int64_t k, int64_t depth) {
  if (!Scaled(side) || side.fine || side.tile_depth.Constant()) return depth;
  const int64_t* table = side.tile_depth.table;
  if (!table) return std::min(k + 1, depth);
  return std::find_if(table + k, table + depth, [&](int64_t tile) { return tile != table[k]; }) -
         table;
}

float Same(float scale) { return scale; }
float Rounded(float scale) { return DecodeBF16(EncodeBF16(scale)); }

// A weight can have millions of scales: the loop has no branch, only comparisons with a vector form
// in every instruction set, and parts of a fixed size.
template <typename T, float (*kDecode)(T)>
bool AllWithin(const Operand& side, float lowest, float highest) {
  const T* scale = static_cast<const T*>(side.scale);
  const auto low = static_cast<int32_t>(BitsOf(lowest));
  const auto high = static_cast<int32_t>(BitsOf(highest));
  const auto beyond = [&](int64_t i) {
    const auto magnitude = static_cast<int32_t>(BitsOf(kDecode(scale[i])) & 0x7fffffff);
    return (magnitude < low ? magnitude : 0) | (magnitude > high ? 1 : 0);
  };
  constexpr int64_t kPart = 64;
  int32_t any = 0;
  int64_t i = 0;
  for (; i + kPart <= side.scales; i += kPart) {
    for (int64_t j = 0; j < kPart; ++j) any |= beyond(i + j);
  }
  for (; i < side.scales; ++i) any |= beyond(i);
  return any == 0;
}

// Whether all scales are 0 or within [lowest, highest]. NaN counts as outside.
bool Within(const Operand& side, float lowest, float highest) {
  if (!side.scale || side.fine) return true;
  switch (side.scale_type) {
    case DType::kBF16:
      return AllWithin<uint16_t, DecodeBF16>(side, lowest, highest);
    case DType::kF16:
      return AllWithin<uint16_t, DecodeF16>(side, lowest, highest);
    case DType::kU8:
      return AllWithin<uint8_t, DecodeE8M0>(side, lowest, highest);
    default:
      if (side.scale_rounded) return AllWithin<float, Rounded>(side, lowest, highest);
      return AllWithin<float, Same>(side, lowest, highest);
  }
}

bool HasNearZeros(const Operand& side) {
  if (!side.zero_point) return false;
  if (side.zero_type != DType::kS32) return true;
  const auto* zero = static_cast<const int32_t*>(side.zero_point);
  int32_t beyond = 0;
  for (int64_t i = 0; i < side.scales; ++i) beyond |= zero[i] < -kNearZero || zero[i] > kNearZero;
  return beyond == 0;
}

std::vector<int64_t> Segments(const CanonicalDot& problem) {
  std::vector<int64_t> ends;
  for (int64_t k = 0, left = 0, right = 0; k < problem.depth;) {
    if (left == k) left = NextTile(problem.lhs, k, problem.depth);
    if (right == k) right = NextTile(problem.rhs, k, problem.depth);
    k = std::min(left, right);
    ends.push_back(k);
  }
  return ends;
}

}  // namespace

CanonicalDot Canonical(const ScaledDotSpec& spec, const Axes& axes, const Form& form,
                       const Buffers& buffers, Tables& tables) {
  const AxisGroups& groups = axes.groups;
  CanonicalDot problem;
  problem.batch = Size(groups.batch);
  problem.rows = Size(groups.rows);
  problem.columns = Size(groups.columns);
  problem.depth = Size(groups.depth);
  problem.lhs = MakeOperand(spec.lhs, axes.lhs, tables);
  problem.rhs = MakeOperand(spec.rhs, axes.rhs, tables);
  problem.lhs.values = static_cast<const uint8_t*>(buffers.lhs);
  problem.rhs.values = static_cast<const uint8_t*>(buffers.rhs);
  problem.lhs.scale = buffers.lhs_scale;
  problem.rhs.scale = buffers.rhs_scale;
  problem.lhs.scale_type = buffers.lhs_scale_type;
  problem.rhs.scale_type = buffers.rhs_scale_type;
  problem.lhs.zero_point = buffers.lhs_zero_point;
  problem.rhs.zero_point = buffers.rhs_zero_point;
  problem.lhs.zero_type = buffers.lhs_zero_type;
  problem.rhs.zero_type = buffers.rhs_zero_type;
  problem.epilogue = MakeEpilogue(spec, buffers, groups, tables);
  if (form.swapped) Swap(problem);
  problem.lhs.prepared = form.lhs.prepared;
  problem.rhs.prepared = form.rhs.prepared;
  return problem;
}

bool HasModerateScales(const CanonicalDot& problem) {
  constexpr float kLarge = 1 << 30;
  const bool bytes = IsEightBit(problem.lhs.dtype) && IsEightBit(problem.rhs.dtype);
  const float highest = bytes ? kLarge : 1;
  return Within(problem.lhs, 1 / kLarge, highest) && Within(problem.rhs, 1 / kLarge, highest);
}

void CutDepth(CanonicalDot& problem, const Form& form, ComputeType compute) {
  if (compute == ComputeType::kFloat32) {
    const int64_t shortest = ShortSegment(form, compute);
    problem.lhs.fine = ChangesOften(form.lhs, form.depth, shortest);
    problem.rhs.fine = ChangesOften(form.rhs, form.depth, shortest);
  }
  if (compute == ComputeType::kInt32) problem.lhs.near_zeros = HasNearZeros(problem.lhs);
  problem.segments = Segments(problem);
  // Prepared columns are multiplied in whole quads.
  for (int64_t end : problem.segments) {
    if (end % kQuad) problem.rhs.prepared = false;
  }
}

}  // namespace jaxfp8
