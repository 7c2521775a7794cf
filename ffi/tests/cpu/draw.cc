#include "tests/cpu/draw.h"

#include <algorithm>
#include <numeric>

#include "cpu/problem.h"

namespace jaxfp8::tests {
namespace {

bool Chance(Random& random, double share) { return std::bernoulli_distribution(share)(random); }

template <typename List>
auto OneOf(const List& list, Random& random) {
  const auto last = static_cast<int64_t>(std::size(list)) - 1;
  return list[std::uniform_int_distribution<int64_t>(0, last)(random)];
}

SideCase Matrix(DType dtype, int64_t first, int64_t second, int64_t contracted) {
  SideCase side;
  side.dtype = dtype;
  side.shape = {first, second};
  side.contracting = {contracted};
  side.tiles = {std::max<int64_t>(first, 1), std::max<int64_t>(second, 1)};
  return side;
}

void DrawFactors(SideCase& side, Random& random) {
  for (size_t axis = 0; axis < side.shape.size(); ++axis) {
    const int64_t whole = std::max<int64_t>(side.shape[axis], 1);
    side.tiles[axis] = OneOf(std::vector<int64_t>{whole, whole, 1, 3, 16, 32, 128}, random);
  }
  side.scale = Chance(random, 0.7);
  side.zero_point = IsInt8(side.dtype) && Chance(random, 0.4);
  side.scale_type = OneOf(kWide, random);
  side.zero_type = OneOf(std::vector<DType>{DType::kS32, DType::kS8, DType::kU8}, random);
}

std::optional<Shape> DrawPlane(const Shape& out, double share, Random& random) {
  if (!Chance(random, share)) return {};
  Shape shape = out;
  for (int64_t& size : shape) size = Chance(random, 0.6) ? size : 1;
  return shape;
}

Shape DrawSizes(int64_t rank, int64_t most, Random& random) {
  const std::vector<int64_t> sizes = {0, 1, 1, 2, 2, 3, 3, 4, 7, 8, 16, 17, 33, 64, 65, 118, 130};
  Shape drawn;
  while (static_cast<int64_t>(drawn.size()) < rank) {
    const int64_t size = OneOf(sizes, random);
    if (size <= most) drawn.push_back(size);
  }
  return drawn;
}

// A side with these axes in random order.
SideCase DrawSide(DType dtype, const Shape& batch, const Shape& contracting, const Shape& free,
                  Random& random) {
  Shape sizes = batch;
  sizes.insert(sizes.end(), contracting.begin(), contracting.end());
  sizes.insert(sizes.end(), free.begin(), free.end());
  Shape place(sizes.size());
  std::iota(place.begin(), place.end(), 0);
  std::shuffle(place.begin(), place.end(), random);
  SideCase side;
  side.dtype = dtype;
  side.shape = side.tiles = Shape(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) side.shape[place[i]] = sizes[i];
  const auto begin = place.begin();
  const auto batches = static_cast<int64_t>(batch.size());
  side.batch = Shape(begin, begin + batches);
  side.contracting =
      Shape(begin + batches, begin + batches + static_cast<int64_t>(contracting.size()));
  DrawFactors(side, random);
  return side;
}

bool IsPlainInteger(const Case& of) {
  return IsInt8(of.lhs.dtype) && IsInt8(of.rhs.dtype) && !of.lhs.scale && !of.rhs.scale;
}

}  // namespace

std::vector<std::pair<DType, DType>> TypePairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (DType narrow : kEightBit) {
    for (DType other : kEightBit) pairs.push_back({narrow, other});
    for (DType wide : kWide) pairs.insert(pairs.end(), {{narrow, wide}, {wide, narrow}});
  }
  return pairs;
}

Case Matrices(DType lhs, DType rhs, const Sizes& sizes, int layout) {
  Case to;
  to.lhs = layout & 1 ? Matrix(lhs, sizes.depth, sizes.rows, 0)
                      : Matrix(lhs, sizes.rows, sizes.depth, 1);
  to.rhs = layout & 2 ? Matrix(rhs, sizes.columns, sizes.depth, 1)
                      : Matrix(rhs, sizes.depth, sizes.columns, 0);
  return to;
}

Shape WeightTiles(int layout, int64_t depth, int64_t columns) {
  return layout & kAlong ? Shape{columns, depth} : Shape{depth, columns};
}

Case Prepared(DType lhs, DType rhs, const Sizes& sizes) {
  Case to;
  to.lhs.dtype = lhs;
  to.lhs.shape = to.lhs.tiles = {sizes.rows, sizes.depth / kQuad, kQuad};
  to.lhs.contracting = {1, 2};
  to.rhs.dtype = rhs;
  to.rhs.shape = to.rhs.tiles = {sizes.columns / kPreparedColumns, sizes.depth / kQuad,
                                 kPreparedColumns, kQuad};
  to.rhs.contracting = {1, 3};
  return to;
}

void DrawFactors(Case& to, Random& random) {
  DrawFactors(to.lhs, random);
  DrawFactors(to.rhs, random);
}

void DrawEpilogue(Case& to, Random& random) {
  if (IsPlainInteger(to) && Chance(random, 0.5)) {
    to.out_dtype = DType::kS32;
    return;
  }
  const Shape out = to.OutShape();
  to.out_dtype =
      OneOf(std::vector<DType>{DType::kF32, DType::kF32, DType::kBF16, DType::kBF16, DType::kF16,
                               DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8},
            random);
  to.residual = DrawPlane(out, 0.3, random);
  to.residual_dtype = OneOf(kWide, random);
  to.bias = DrawPlane(out, 0.4, random);
  to.bias_dtype = OneOf(kWide, random);
  to.activation = Chance(random, 0.5) ? OneOf(kActivations, random) : "none";
  to.out_scale = DrawPlane(out, IsEightBit(to.out_dtype) ? 0.8 : 0.0, random);
  to.amax = DrawPlane(out, 0.3, random);
}

Case DrawCase(Random& random) {
  const int64_t ranks[] = {1, 1, 1, 2, 0}, batch_ranks[] = {0, 0, 0, 1, 2};
  const Shape batch = DrawSizes(OneOf(batch_ranks, random), 3, random);
  const Shape contracting = DrawSizes(OneOf(ranks, random), 140, random);
  Shape shared = batch;
  for (int64_t& size : shared) size = Chance(random, 0.3) ? 1 : size;
  auto [lhs, rhs] = OneOf(TypePairs(), random);
  const bool left = Chance(random, 0.5);
  Case to;
  to.lhs = DrawSide(lhs, left ? shared : batch, contracting,
                    DrawSizes(OneOf(ranks, random), 70, random), random);
  to.rhs = DrawSide(rhs, left ? batch : shared, contracting,
                    DrawSizes(OneOf(ranks, random), 70, random), random);
  DrawEpilogue(to, random);
  return to;
}

}  // namespace jaxfp8::tests
