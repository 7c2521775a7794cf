// Scales along the depth: every block of it has its own.

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

constexpr std::pair<DType, DType> kTypes[] = {{DType::kS8, DType::kS8},
                                              {DType::kE4M3, DType::kE4M3}};

}  // namespace

// Tiles on both sides with a partial last one, in depths below and above one chunk.
CLAIM(ScalesAlongTheDepthAreWithinTheBound) {
  for (auto [lhs, rhs] : kTypes) {
    for (int64_t tile : {1, 5, 16, 32, 128}) {
      for (const Sizes& sizes : {Sizes{5, 1, 67}, Sizes{5, 3, 67}, Sizes{5, 118, 67},
                                 Sizes{5, 700, 67}, Sizes{130, 700, 67}}) {
        Case of = Matrices(lhs, rhs, sizes, kAlong);
        of.lhs.scale = of.rhs.scale = true;
        of.lhs.tiles = {1, tile}, of.rhs.tiles = {32, 2 * tile};
        harness.Draw(of, Values::kFinite, sizes.rows > 5 ? Cost::kLarge : Cost::kSmall);
      }
    }
  }
}

// Multiplied value by value they would overflow, and their sums do not.
CLAIM(ScalesOfShortBlocksMayBeFarBeyondTheValues) {
  for (int64_t tile : {16, 20, 32}) {
    Case of = Matrices(DType::kE4M3, DType::kE4M3, {130, 256, 66}, kAcross);
    of.lhs.scale = of.rhs.scale = true;
    of.lhs.tiles = {1, tile}, of.rhs.tiles = {tile, 1};
    if (!harness.Begin(of.Text())) continue;
    const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
    Fill(operands.lhs_scale, 0x1p-120);
    Fill(operands.rhs_scale, 0x1p121);
    harness.Check(of, operands);
  }
}

// Moderate scales, and ones whose product is barely a float32.
CLAIM(BlocksOfDepthAreWithinTheBoundForAnyScales) {
  constexpr std::pair<double, double> kFactors[] = {{1, 1}, {1e30, 1e-30}, {1e-22, 1e-22}};
  for (auto [lhs, rhs] : kTypes) {
    for (auto [left, right] : kFactors) {
      for (int64_t rows : {1, 3, 6, 33}) {
        for (int layout : kWeightLayouts) {
          Case of = Matrices(lhs, rhs, {rows, 1100, 201}, layout);
          of.lhs.scale = of.rhs.scale = true;
          of.lhs.tiles = {1, 100}, of.rhs.tiles = {100, 100};
          if (!harness.Begin(of.Text() + ", scales times " + std::to_string(left))) continue;
          const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
          for (int64_t i = 0; i < operands.lhs_scale.count(); ++i) {
            Put(operands.lhs_scale, i, ValueOf(operands.lhs_scale, i) * left);
          }
          for (int64_t i = 0; i < operands.rhs_scale.count(); ++i) {
            Put(operands.rhs_scale, i, ValueOf(operands.rhs_scale, i) * right);
          }
          harness.Check(of, operands);
        }
      }
    }
  }
}

// 1e30 and -1e30 times 2^30 cancel, though float32 holds neither.
CLAIM(SumsOfBlocksThatCancelMayBeBeyondFloat32) {
  for (int64_t rows : {2, 33}) {
    for (int layout : kWeightLayouts) {
      Case of = Matrices(DType::kBF16, DType::kE4M3, {rows, 512, 70}, layout);
      of.rhs.scale = true;
      of.rhs.tiles = WeightTiles(layout, 128, 70);
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      Fill(operands.lhs, 0);
      for (int64_t row = 0; row < rows; ++row) {
        Put(operands.lhs, row * 512, 1e30);
        Put(operands.lhs, row * 512 + 128, -1e30);
        Put(operands.lhs, row * 512 + 256, 1);
      }
      Fill(operands.rhs, 1);
      Fill(operands.rhs_scale, 0x1p30);
      harness.CheckExact(of, operands);
    }
  }
}

}  // namespace jaxfp8::tests
