#include "cpu/problem.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/decode.h"
#include "common/encode.h"
#include "common/shapes.h"

namespace jaxfp8 {
namespace {

// Below this many values per segment, scaling each value beats scaling each sum; up to this depth
// the sums win again, because they are scaled in float64.
constexpr int64_t kShortSegment = 16;
constexpr int64_t kShallow = 64;
// From so many rows on, which share what is scaled, segments are short too that have 32 values, as
// MX formats do; but 16 where products of bfloat16, of half the time, are what is given up.
constexpr int64_t kManyRows = 128;
constexpr int64_t kShortOfFloats = 33, kShortOfHalves = 24;

// Up to this many columns, fewer than rows, are better taken as rows, although the output is then
// written across: a register tile has up to 64 columns.
constexpr int64_t kNarrow = 64;

// One axis of the dot, and where it is found in each array; -1 where it is not.
struct Axis {
  int64_t size;
  int lhs;
  int rhs;
  int out;
};

struct Groups {
  std::vector<Axis> batch, rows, columns, depth;
};

// The contribution of one axis of one array: stride * (index / tile).
struct Digit {
  int64_t size;
  int64_t stride;
  int64_t tile;
};

void AddBatchAxes(const ScaledDotSpec& spec, Groups& groups) {
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

Groups GroupAxes(const ScaledDotSpec& spec) {
  Groups groups;
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

int64_t Size(const std::vector<Axis>& group) {
  int64_t size = 1;
  for (const Axis& axis : group) size *= axis.size;
  return size;
}

std::vector<int64_t> Strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// Joins neighbours that count on like one digit, and drops those that never move.
std::vector<Digit> Simplify(const std::vector<Digit>& digits) {
  std::vector<Digit> out;
  for (Digit digit : digits) {
    if (digit.size == 1) continue;
    if (digit.tile >= digit.size) digit.stride = 0;
    if (digit.stride == 0) digit.tile = 1;
    Digit* last = out.empty() ? nullptr : &out.back();
    if (last && last->tile == 1 && digit.tile == 1 && last->stride == digit.stride * digit.size) {
      *last = {last->size * digit.size, digit.stride, 1};
    } else {
      out.push_back(digit);
    }
  }
  return out;
}

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

// Offsets::run of a table.
int64_t RunOf(const std::vector<Digit>& digits) {
  const Digit& last = digits.back();
  const int64_t run = std::max<int64_t>(last.stride == 0 ? last.size : last.tile, 1);
  return digits.size() == 1 || last.size % run == 0 ? run : 1;
}

Offsets MakeOffsets(const std::vector<Digit>& digits, Tables& tables) {
  if (digits.empty()) return {};
  if (digits.size() == 1 && digits[0].tile == 1) return {nullptr, digits[0].stride};
  int64_t size = 1;
  for (const Digit& digit : digits) size *= digit.size;
  tables.push_back(std::make_unique<int64_t[]>(size));
  int64_t* next = tables.back().get();
  Fill(digits, 0, 0, next);
  return {tables.back().get(), 0, RunOf(digits)};
}

// An array and the place of each axis of the dot in it.
class Array {
 public:
  Array(Dims shape, Dims tiles, int Axis::* place) : place_(place) {
    for (size_t i = 0; i < shape.size(); ++i) {
      tiles_.push_back(tiles.empty() ? 1 : tiles[i]);
      sizes_.push_back(TileCount(shape[i], tiles_[i]));
      alone_.push_back(shape[i] == 1);
    }
    strides_ = Strides(sizes_);
  }

  std::vector<Digit> Digits(const std::vector<Axis>& group) const {
    std::vector<Digit> digits;
    for (const Axis& axis : group) {
      const int i = axis.*place_;
      const bool still = i < 0 || alone_[i];
      digits.push_back({axis.size, still ? 0 : strides_[i], still ? 1 : tiles_[i]});
    }
    return Simplify(digits);
  }

  Offsets Along(const std::vector<Axis>& group, Tables& tables) const {
    return MakeOffsets(Digits(group), tables);
  }

  int64_t Count() const {
    return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
  }

 private:
  int Axis::* place_;
  std::vector<int64_t> tiles_, sizes_, strides_;
  std::vector<bool> alone_;
};

bool Is(const Digit& digit, int64_t size, int64_t stride) {
  return digit.size == size && digit.stride == stride;
}

// Side::prepared of an array of bytes.
bool Prepared(const std::vector<Digit>& free, const std::vector<Digit>& depth) {
  if (free.empty() || !Is(free.back(), kPreparedColumns, kQuad)) return false;
  if (depth.empty() || !Is(depth.back(), kQuad, 1)) return false;
  return depth.size() == 1 || (depth.size() == 2 && depth[0].stride == kPreparedColumns * kQuad);
}

Side MakeSide(const OperandSpec& spec, int Axis::* place, const Groups& groups,
              const std::vector<Axis>& free, Tables& tables) {
  Side side;
  side.dtype = ParseDType(spec.dtype);
  const Array values(spec.shape, {}, place);
  side.batch = values.Along(groups.batch, tables);
  const std::vector<Digit> along_free = values.Digits(free);
  const std::vector<Digit> along_depth = values.Digits(groups.depth);
  side.free = MakeOffsets(along_free, tables);
  side.depth = MakeOffsets(along_depth, tables);
  side.prepared = IsEightBit(side.dtype) && Prepared(along_free, along_depth);
  if (!spec.scale && !spec.zero_point) return side;
  const Array scales(spec.shape, spec.tiles, place);
  side.scales = scales.Count();
  side.scale_rounded = spec.scale_rounded;
  side.tile_batch = scales.Along(groups.batch, tables);
  side.tile_free = scales.Along(free, tables);
  side.tile_depth = scales.Along(groups.depth, tables);
  return side;
}

Plane MakePlane(bool given, void* data, DType dtype, Dims shape, const Groups& groups,
                Tables& tables) {
  if (!given) return {};
  const Array array(shape, {}, &Axis::out);
  return {data, dtype, array.Along(groups.batch, tables), array.Along(groups.rows, tables),
          array.Along(groups.columns, tables)};
}

Epilogue MakeEpilogue(const ScaledDotSpec& spec, const Buffers& buffers, const Groups& groups,
                      Tables& tables) {
  const EpilogueSpec& from = spec.epilogue;
  Epilogue to;
  to.activation = ParseActivation(from.activation);
  to.residual = MakePlane(from.has_residual, buffers.residual, ParseDType(from.residual_dtype),
                          from.residual, groups, tables);
  to.bias = MakePlane(from.has_bias, buffers.bias, buffers.bias_type, from.bias, groups, tables);
  to.out_scale =
      MakePlane(from.has_out_scale, buffers.out_scale, DType::kF32, from.out_scale, groups, tables);
  to.amax = MakePlane(from.has_amax, buffers.amax, DType::kF32, from.amax, groups, tables);
  to.out = MakePlane(true, buffers.out, ParseDType(from.out_dtype), OutShape(spec), groups, tables);
  return to;
}

void Swap(Problem& problem) {
  std::swap(problem.rows, problem.columns);
  std::swap(problem.lhs, problem.rhs);
  Epilogue& epilogue = problem.epilogue;
  for (Plane* plane :
       {&epilogue.residual, &epilogue.bias, &epilogue.out_scale, &epilogue.amax, &epilogue.out}) {
    std::swap(plane->rows, plane->columns);
  }
}

bool Scaled(const Side& side) { return side.scale || side.zero_point; }

// Where the next tile of `side` starts after depth k, or the end.
int64_t NextTile(const Side& side, int64_t k, int64_t depth) {
  if (!Scaled(side) || side.fine || side.tile_depth.Constant()) return depth;
  const int64_t* table = side.tile_depth.table;
  if (!table) return std::min(k + 1, depth);
  return std::find_if(table + k, table + depth, [&](int64_t tile) { return tile != table[k]; }) -
         table;
}

bool ChangesOften(const Side& side, int64_t depth, int64_t shortest) {
  if (depth <= kShallow) return false;
  int64_t segments = 0;
  for (int64_t k = 0; k < depth; k = NextTile(side, k, depth)) ++segments;
  return depth < segments * shortest;
}

// Values per segment below which a kernel with such sums had better scale each. More of them only
// if float32 holds what it did not have to hold.
int64_t ShortSegment(const Problem& problem, Sums sums) {
  if (problem.rows < kManyRows || sums == Sums::kInteger) return kShortSegment;
  const int64_t longer = sums == Sums::kFloat32 ? kShortOfFloats : kShortOfHalves;
  return ChangesOften(problem, longer) && !HasModerateScales(problem) ? kShortSegment : longer;
}

float Same(float scale) { return scale; }
float Rounded(float scale) { return DecodeBF16(EncodeBF16(scale)); }

// Without a branch, by comparisons that all vectors have: there can be many.
template <typename T, float (*kDecode)(T)>
bool AllWithin(const Side& side, float lowest, float highest) {
  const T* scale = static_cast<const T*>(side.scale);
  const auto low = static_cast<int32_t>(BitsOf(lowest));
  const auto high = static_cast<int32_t>(BitsOf(highest));
  int32_t beyond = 0;
  for (int64_t i = 0; i < side.scales; ++i) {
    const auto magnitude = static_cast<int32_t>(BitsOf(kDecode(scale[i])) & 0x7fffffff);
    beyond |= (magnitude < low ? magnitude : 0) | (magnitude > high ? 1 : 0);
  }
  return beyond == 0;
}

// Whether no scale is beyond `lowest` and `highest`, or NaN.
bool Within(const Side& side, float lowest, float highest) {
  if (!side.scale || side.fine) return true;
  switch (side.scale_type) {
    case DType::kBF16:
      return AllWithin<uint16_t, DecodeBF16>(side, lowest, highest);
    case DType::kF16:
      return AllWithin<uint16_t, DecodeF16>(side, lowest, highest);
    default:
      if (side.scale_rounded) return AllWithin<float, Rounded>(side, lowest, highest);
      return AllWithin<float, Same>(side, lowest, highest);
  }
}

bool HasNearZeros(const Side& side) {
  if (!side.zero_point) return false;
  if (side.zero_type != DType::kS32) return true;
  const auto* zero = static_cast<const int32_t*>(side.zero_point);
  int32_t beyond = 0;
  for (int64_t i = 0; i < side.scales; ++i) beyond |= zero[i] < -kNearZero || zero[i] > kNearZero;
  return beyond == 0;
}

std::vector<int64_t> Segments(const Problem& problem) {
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

Problem Canonical(const ScaledDotSpec& spec, const Buffers& buffers, Tables& tables) {
  const Groups groups = GroupAxes(spec);
  Problem problem;
  problem.batch = Size(groups.batch);
  problem.rows = Size(groups.rows);
  problem.columns = Size(groups.columns);
  problem.depth = Size(groups.depth);
  problem.lhs = MakeSide(spec.lhs, &Axis::lhs, groups, groups.rows, tables);
  problem.rhs = MakeSide(spec.rhs, &Axis::rhs, groups, groups.columns, tables);
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
  if (problem.rows > problem.columns && problem.columns <= kNarrow && !problem.rhs.prepared) {
    Swap(problem);
  }
  return problem;
}

bool HasModerateScales(const Problem& problem) {
  constexpr float kLarge = 1 << 30;
  const bool bytes = IsEightBit(problem.lhs.dtype) && IsEightBit(problem.rhs.dtype);
  const float highest = bytes ? kLarge : 1;
  return Within(problem.lhs, 1 / kLarge, highest) && Within(problem.rhs, 1 / kLarge, highest);
}

bool ChangesOften(const Problem& problem, int64_t shortest) {
  return ChangesOften(problem.lhs, problem.depth, shortest) ||
         ChangesOften(problem.rhs, problem.depth, shortest);
}

bool HasShortSegments(const Problem& problem, Sums sums) {
  return ChangesOften(problem, ShortSegment(problem, sums));
}

void CutDepth(Problem& problem, Sums sums) {
  if (sums == Sums::kFloat32) {
    const int64_t shortest = ShortSegment(problem, sums);
    problem.lhs.fine = ChangesOften(problem.lhs, problem.depth, shortest);
    problem.rhs.fine = ChangesOften(problem.rhs, problem.depth, shortest);
  }
  if (sums == Sums::kInteger) problem.lhs.near_zeros = HasNearZeros(problem.lhs);
  problem.segments = Segments(problem);
  // A quad is multiplied as a whole.
  for (int64_t end : problem.segments) {
    if (end % kQuad) problem.rhs.prepared = false;
  }
}

}  // namespace jaxfp8
