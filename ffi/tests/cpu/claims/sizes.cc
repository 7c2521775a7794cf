// Results are within the bound for every size, layout and pair of types.

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

// Sizes at and around those of vectors, register tiles, groups of depth and slabs of rows.
constexpr Sizes kSizes[] = {
    {0, 5, 7},    {5, 0, 7},     {5, 7, 0},    {0, 0, 0},    {1, 1, 1},    {1, 1, 64},
    {1, 64, 1},   {1, 129, 130}, {2, 3, 65},   {3, 64, 64},  {4, 17, 63},  {4, 128, 64},
    {4, 257, 65}, {5, 65, 17},   {6, 16, 64},  {7, 31, 66},  {8, 32, 128}, {12, 48, 16},
    {13, 2, 15},  {16, 66, 67},  {17, 17, 17}, {17, 33, 49}, {33, 5, 47},  {48, 20, 50},
    {49, 40, 51}, {64, 64, 64},  {65, 4, 3},   {70, 3, 71},  {1, 600, 3},  {3, 513, 33},
};

constexpr std::pair<DType, DType> kFloatAndInteger[] = {{DType::kBF16, DType::kE4M3},
                                                        {DType::kU8, DType::kS8}};

// A scale per column, and for integers zero points.
void GiveColumnFactors(Case& to, int64_t depth, int layout) {
  to.rhs.scale = true;
  to.rhs.tiles = WeightTiles(layout, depth, 1);
  to.lhs.zero_point = to.rhs.zero_point = IsInt8(to.lhs.dtype);
}

}  // namespace

CLAIM(AnySizeOfAnyTypesIsWithinTheBound) {
  int turn = 0;
  for (auto [lhs, rhs] : TypePairs()) {
    for (const Sizes& sizes : kSizes) {
      ++turn;
      for (int layout = 0; layout < kLayouts; ++layout) {
        Case of = Matrices(lhs, rhs, sizes, layout);
        if (layout == turn % kLayouts) harness.Draw(of, Values::kSpecial);
        Random random(turn * kLayouts + layout);
        DrawFactors(of, random);
        DrawEpilogue(of, random);
        harness.Draw(of);
      }
    }
  }
}

// Some of the scales along either axis part the groups of four.
CLAIM(PreparedColumnsOfAnySizeAndTypesAreWithinTheBound) {
  constexpr Sizes kWhole[] = {{1, 4, 64},    {2, 64, 128}, {3, 260, 64}, {4, 512, 64},
                              {5, 12, 192},  {9, 64, 64},  {17, 68, 64}, {33, 192, 128},
                              {70, 128, 64}, {200, 8, 320}};
  int turn = 0;
  for (auto [lhs, rhs] : TypePairs()) {
    if (!IsEightBit(rhs)) continue;
    for (const Sizes& sizes : kWhole) {
      Case of = Prepared(lhs, rhs, sizes);
      harness.Draw(of, Values::kSpecial);
      Random random(++turn);
      DrawFactors(of, random);
      DrawEpilogue(of, random);
      harness.Draw(of);
    }
  }
}

// Depths that fill no tile, scales per block, scales that part groups of four, zero points.
CLAIM(PreparedColumnsOfManyRowsAreWithinTheBound) {
  const struct {
    int64_t depth, columns;
    Shape tiles;
  } kWeights[] = {{4, 64, {1, 1, 1, 4}},
                  {516, 192, {1, 32, 64, 4}},
                  {64, 128, {2, 1, 64, 2}},
                  {5004, 128, {2, 8, 64, 4}}};
  for (auto [lhs, rhs] : kFloatAndInteger) {
    for (int64_t rows : {1, 3, 4, 5, 15, 16, 17, 70}) {
      for (const auto& weight : kWeights) {
        Case of = Prepared(lhs, rhs, {rows, weight.depth, weight.columns});
        of.rhs.tiles = weight.tiles;
        of.rhs.scale = true;
        of.lhs.zero_point = of.rhs.zero_point = IsInt8(lhs);
        harness.Draw(of, Values::kFinite, Cost::kLarge);
      }
    }
    for (const Sizes& sizes : {Sizes{2, 4352, 64}, Sizes{6, 8260, 64}, Sizes{300, 4352, 64}}) {
      harness.Draw(Prepared(lhs, rhs, sizes), Values::kFinite, Cost::kLarge);
    }
  }
}

// More depth than one chunk, more rows than one packed block, more columns than one share of work.
CLAIM(LargeProductsAreWithinTheBound) {
  constexpr Sizes kLarge[] = {{1, 9001, 65},  {4, 4097, 64},  {5, 4200, 66},    {23, 3100, 67},
                              {33, 300, 35},  {64, 520, 100}, {100, 1000, 110}, {128, 1100, 70},
                              {300, 40, 310}, {30, 600, 700}, {259, 1700, 650}};
  for (auto [lhs, rhs] : kFloatAndInteger) {
    for (const Sizes& sizes : kLarge) {
      for (int layout = 0; layout < kLayouts; ++layout) {
        Case of = Matrices(lhs, rhs, sizes, layout);
        harness.Draw(of, Values::kFinite, Cost::kLarge);
        GiveColumnFactors(of, 100, layout);
        harness.Draw(of, Values::kFinite, Cost::kLarge);
      }
    }
  }
}

// On both sides of where rows and columns change places.
CLAIM(MoreRowsThanColumnsAreWithinTheBound) {
  constexpr std::pair<DType, DType> kTypes[] = {{DType::kS8, DType::kU8},
                                                {DType::kBF16, DType::kE5M2}};
  for (auto [lhs, rhs] : kTypes) {
    for (int64_t columns : {63, 64, 65, 300}) {
      for (int64_t rows : {16, 64, 70}) {
        Case of = Matrices(lhs, rhs, {rows, 1100, columns}, kAcross);
        of.rhs.scale = true;
        of.rhs.tiles = {1100, 1};
        harness.Draw(of, Values::kFinite, Cost::kLarge);
      }
    }
  }
}

// Depths and columns that fill no vector, and more than one block of either; zero points.
CLAIM(FewRowsOfEitherLayoutAreWithinTheBound) {
  constexpr std::pair<DType, DType> kTypes[] = {{DType::kS8, DType::kS8},
                                                {DType::kS8, DType::kU8},
                                                {DType::kBF16, DType::kE4M3},
                                                {DType::kBF16, DType::kE5M2},
                                                {DType::kBF16, DType::kU8}};
  constexpr struct {
    int64_t depth, columns, tile;
  } kWeights[] = {{5, 64, 3000}, {5003, 67, 3000}, {70, 2120, 3000}, {20'011, 5, 30'000}};
  for (int64_t rows : {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 48, 49, 64, 100, 128}) {
    for (auto [lhs, rhs] : kTypes) {
      for (const auto& weight : kWeights) {
        for (int layout : kWeightLayouts) {
          Case of = Matrices(lhs, rhs, {rows, weight.depth, weight.columns}, layout);
          GiveColumnFactors(of, weight.tile, layout);
          harness.Draw(of, Values::kFinite, Cost::kLarge);
        }
      }
    }
  }
}

// A weight [N, K] in chunks as long as tiles of rows take; a scale for each row, or for its chunks.
// Scales from 1/4 to 3/4 let float32 add the sums of chunks.
CLAIM(TilesOfRowsAlongTheDepthAreWithinTheBound) {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kBF16, DType::kE4M3}, {DType::kS8, DType::kS8}, {DType::kU8, DType::kS8}};
  for (auto [lhs, rhs] : kTypes) {
    for (const Sizes& sizes : {Sizes{20, 768, 33}, Sizes{40, 1152, 41}, Sizes{100, 2688, 70}}) {
      Case of = Matrices(lhs, rhs, sizes, kAlong);
      of.lhs.scale = of.rhs.scale = true;
      of.lhs.zero_point = of.rhs.zero_point = lhs == DType::kU8;
      const int64_t tile = lhs == DType::kS8 ? 128 : sizes.depth / 3;
      of.rhs.tiles = {1, tile};
      for (const int64_t depth : {sizes.depth, tile}) {
        of.lhs.tiles = {1, depth};
        if (!harness.Begin(of.Text())) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        for (const Array* scale : {&operands.lhs_scale, &operands.rhs_scale}) {
          for (int64_t i = 0; i < scale->count(); ++i) Put(*scale, i, 0.25 + i * 37 % 64 / 128.0);
        }
        harness.Check(of, operands);
      }
    }
  }
}

// Any types, axes, tiles, zero points, epilogue and sizes.
CLAIM(RandomProblemsAreWithinTheBound) {
  for (int64_t i = 0; i < harness.options().random; ++i) {
    const std::string seed =
        std::to_string(i) + " of seed " + std::to_string(harness.options().seed);
    if (!harness.Begin("problem " + seed)) continue;
    const Case of = DrawCase(harness.random());
    const Values values = i % 4 ? Values::kFinite : Values::kSpecial;
    harness.Check(of, DrawOperands(of, values, harness.random()));
  }
}

}  // namespace jaxfp8::tests
