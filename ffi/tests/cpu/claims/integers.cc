// Sums of integers are exact.

#include <cmath>

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

constexpr DType kIntegers[] = {DType::kS8, DType::kU8};

double LowestOf(DType dtype) { return dtype == DType::kS8 ? -128 : 0; }
double HighestOf(DType dtype) { return LowestOf(dtype) + 255; }

}  // namespace

CLAIM(SumsOfExtremeIntegersAreExact) {
  for (DType lhs : kIntegers) {
    for (DType rhs : kIntegers) {
      for (int layout : kWeightLayouts) {
        for (int ends = 0; ends < 4; ++ends) {
          Case of = Matrices(lhs, rhs, {2, 33'000, 3}, layout);
          of.out_dtype = DType::kS32;
          if (!harness.Begin(of.Text() + ", ends " + std::to_string(ends))) continue;
          const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
          Fill(operands.lhs, ends & 1 ? HighestOf(lhs) : LowestOf(lhs));
          Fill(operands.rhs, ends & 2 ? HighestOf(rhs) : LowestOf(rhs));
          harness.CheckExact(of, operands);
        }
      }
    }
  }
}

// The sum of a block is exact, at the ends of the range too. float32 may add the blocks up.
CLAIM(SumsOfBlocksOfExtremeIntegersAreExact) {
  constexpr struct {
    int64_t depth, tile;
  } kCuts[] = {{1024, 256}, {1000, 128}, {96, 32}, {513, 64}, {1536, 512}};
  for (DType lhs : kIntegers) {
    for (DType rhs : kIntegers) {
      for (const auto& cut : kCuts) {
        const int64_t m = 40, n = 70, k = cut.depth;
        Case of = Matrices(lhs, rhs, {m, k, n}, kAcross);
        of.lhs.scale = of.rhs.scale = true;
        of.lhs.tiles = {m, cut.tile}, of.rhs.tiles = {cut.tile, 64};
        if (!harness.Begin(of.Text())) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        FillFrom(operands.lhs, {LowestOf(lhs), HighestOf(lhs), 1}, harness.random());
        FillFrom(operands.rhs, {LowestOf(rhs), HighestOf(rhs), 1}, harness.random());
        for (int64_t i = 0; i < 3 * k; ++i) Put(operands.lhs, i, HighestOf(lhs));
        for (int64_t i = 0; i < k; ++i) {
          for (int64_t j = 0; j < 3; ++j) Put(operands.rhs, i * n + j, HighestOf(rhs));
        }
        Fill(operands.lhs_scale, 0.125);
        Fill(operands.rhs_scale, 1);
        // Only the additions of whole blocks may be rounded.
        Exact exact = Compute(of, operands);
        const auto blocks = static_cast<double>((k + cut.tile - 1) / cut.tile);
        for (int64_t i = 0; i < m * n; ++i) {
          double magnitude = 0;
          for (int64_t start = 0; start < k; start += cut.tile) {
            double block = 0;
            for (int64_t d = start; d < std::min(start + cut.tile, k); ++d) {
              block += ValueOf(operands.lhs, i / n * k + d) * ValueOf(operands.rhs, d * n + i % n);
            }
            magnitude += std::abs(block);
          }
          exact.error[i] = blocks * 0x1p-24 * magnitude * 0.125;
        }
        harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& results) {
          return kernel.SumsIntegers() ? WhyBeyondError(exact, results) : "";
        });
        harness.Check(of, operands);
      }
    }
  }
}

CLAIM(IntegerProductsOfAnySizeAreExact) {
  for (int64_t size : {0, 1, 2, 3, 17, 118, 300}) {
    for (const Sizes& sizes : {Sizes{size, 5, 7}, Sizes{3, size, 70}, Sizes{9, 33, size}}) {
      Case of = Matrices(DType::kS8, DType::kU8, sizes, kAcross);
      of.out_dtype = DType::kS32;
      harness.Draw(of);
    }
  }
}

// Rows of ones, so that each output is the sum of a column.
CLAIM(AWeightLargerThanCachesIsReadWhole) {
  for (DType lhs : {DType::kS8, DType::kBF16}) {
    const Case of = Matrices(lhs, DType::kS8, {2, 1501, 17'001}, kAcross);
    if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
    const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
    Fill(operands.lhs, 1.0);
    harness.CheckExact(of, operands);
  }
}

}  // namespace jaxfp8::tests
