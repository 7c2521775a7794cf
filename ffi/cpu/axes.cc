#include "cpu/axes.h"

#include "common/shapes.h"

namespace jaxfp8 {
namespace {

void AddBatchAxes(const ScaledDotSpec& spec, AxisGroups& groups) {
  for (size_t i = 0; i < spec.lhs.batch.size(); ++i) {
    const int lhs = static_cast<int>(spec.lhs.batch[i]);
    const int rhs = static_cast<int>(spec.rhs.batch[i]);
    const int64_t left = spec.lhs.shape[lhs];
    const int64_t right = spec.rhs.shape[rhs];
    const Axis axis{left == 1 ? right : left, lhs, rhs, static_cast<int>(i)};
    std::vector<Axis>& group = right == 1 ? groups.rows : left == 1 ? groups.columns : groups.batch;
    group.push_back(axis);
  }
}

// Appends a digit: merges it with the last one if one stride serves both, drops it if it is
// constant.
void Append(Digit digit, std::vector<Digit>& to) {
  if (digit.size == 1) return;
  if (digit.tile >= digit.size) digit.stride = 0;
  if (digit.stride == 0) digit.tile = 1;
  Digit* last = to.empty() ? nullptr : &to.back();
  if (last && last->tile == 1 && digit.tile == 1 && last->stride == digit.stride * digit.size) {
    *last = {last->size * digit.size, digit.stride, 1};
  } else {
    to.push_back(digit);
  }
}

AxisGroups GroupAxes(const ScaledDotSpec& spec) {
  AxisGroups groups;
  AddBatchAxes(spec, groups);
  int out = static_cast<int>(spec.lhs.batch.size());
  for (int axis : FreeAxes(spec.lhs))
    groups.rows.push_back({spec.lhs.shape[axis], axis, -1, out++});
  for (int axis : FreeAxes(spec.rhs)) {
    groups.columns.push_back({spec.rhs.shape[axis], -1, axis, out++});
  }
  for (size_t i = 0; i < spec.lhs.contracting.size(); ++i) {
    const int lhs = static_cast<int>(spec.lhs.contracting[i]);
    const int rhs = static_cast<int>(spec.rhs.contracting[i]);
    groups.depth.push_back({spec.lhs.shape[lhs], lhs, rhs, -1});
  }
  return groups;
}

OperandAxes MakeOperand(const OperandSpec& spec, int Axis::* place, const AxisGroups& groups,
                        const std::vector<Axis>& free) {
  const AxisArray values(spec.shape, {}, place);
  OperandAxes side;
  side.batch = values.Digits(groups.batch);
  side.free = values.Digits(free);
  side.depth = values.Digits(groups.depth);
  if (!spec.scale && !spec.zero_point) return side;
  const AxisArray tiles(spec.shape, spec.tiles, place);
  side.tile_batch = tiles.Digits(groups.batch);
  side.tile_free = tiles.Digits(free);
  side.tile_depth = tiles.Digits(groups.depth);
  side.tiles = tiles.Count();
  return side;
}

}  // namespace

int64_t Size(const std::vector<Axis>& group) {
  int64_t size = 1;
  for (const Axis& axis : group) size *= axis.size;
  return size;
}

// An offset equals the one before unless some digit enters its next tile. When a digit steps, all
// those inside it restart: one with several tiles changes the offset as well.
int64_t CountSegments(const std::vector<Digit>& digits) {
  int64_t segments = 1, outer = 1;
  bool moves = false;
  for (const Digit& digit : digits) outer *= digit.size;
  for (size_t i = digits.size(); i-- > 0;) {
    const Digit& digit = digits[i];
    if (digit.size == 0) return 0;
    outer /= digit.size;
    const int64_t tiles = digit.stride == 0 ? 1 : TileCount(digit.size, digit.tile);
    segments += outer * ((moves ? digit.size : tiles) - 1);
    moves |= tiles > 1;
  }
  return segments;
}

AxisArray::AxisArray(Dims shape, Dims tiles, int Axis::* place)
    : place_(place), axes_(shape.size()) {
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    const int64_t tile = tiles.empty() ? 1 : tiles[i];
    axes_[i] = {shape[i], tile, stride};
    stride *= TileCount(shape[i], tile);
  }
}

std::vector<Digit> AxisArray::Digits(const std::vector<Axis>& group) const {
  std::vector<Digit> digits;
  for (const Axis& axis : group) {
    const int i = axis.*place_;
    const bool still = i < 0 || axes_[i].size == 1;
    Append(still ? Digit{axis.size, 0, 1} : Digit{axis.size, axes_[i].stride, axes_[i].tile},
           digits);
  }
  return digits;
}

int64_t AxisArray::Count() const {
  int64_t count = 1;
  for (const Place& axis : axes_) count *= TileCount(axis.size, axis.tile);
  return count;
}

Axes AxesOf(const ScaledDotSpec& spec) {
  Axes axes;
  axes.groups = GroupAxes(spec);
  axes.lhs = MakeOperand(spec.lhs, &Axis::lhs, axes.groups, axes.groups.rows);
  axes.rhs = MakeOperand(spec.rhs, &Axis::rhs, axes.groups, axes.groups.columns);
  return axes;
}

}  // namespace jaxfp8
