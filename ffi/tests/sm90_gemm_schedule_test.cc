// The schedules of `sm90_gemm` and the W8A16 kernel: every tile of the output belongs to one block
// of one unit; which tile shape a product gets; which operands are copied.

#include <cstdio>
#include <initializer_list>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/kernels/common/divisor.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_gemm/schedule.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"
#include "cuda/path.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::sm90 {
namespace {

using tests::Expect;

constexpr int32_t kH100 = 132;

Problem Product(int64_t batch, int64_t rows, int64_t columns, int64_t depth,
                DType type = DType::kE4M3) {
  Problem p;
  p.batch = batch, p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = p.rhs.dtype = type;
  p.lhs.batch_stride = rows * depth, p.lhs.free_stride = depth, p.lhs.depth_stride = 1;
  p.rhs.batch_stride = columns * depth, p.rhs.free_stride = depth, p.rhs.depth_stride = 1;
  return p;
}

std::string NameOf(const Configuration& c) {
  return std::to_string(c.tile.rows) + "x" + std::to_string(c.tile.columns) +
         (c.pair == Pair::kNone        ? ""
          : c.pair == Pair::kSharesLhs ? " in pairs sharing lhs"
                                       : " in pairs sharing rhs");
}

void CheckCover(const Problem& p, const Configuration& c) {
  const std::string name = std::to_string(p.batch) + " of " + std::to_string(p.rows) + "x" +
                           std::to_string(p.columns) + " by " + NameOf(c) + ": ";
  const TileSchedule s = MakeSchedule(p, c);
  const int32_t ranks = c.pair == Pair::kNone ? 1 : 2;
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;
  int64_t inside = 0;
  for (int32_t unit = 0; unit < s.units; ++unit) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const TileCoord t = TileOf(s, unit, rank);
      Expect(seen.insert({t.batch, t.row, t.column}).second, name + "no tile is computed twice");
      Expect(0 <= t.batch && t.batch < p.batch && t.row >= 0 && t.column >= 0,
             name + "a tile is in the output");
      inside +=
          int64_t{t.row} * c.tile.rows < p.rows && int64_t{t.column} * c.tile.columns < p.columns;
    }
  }
  const int64_t down = (p.rows + c.tile.rows - 1) / c.tile.rows;
  const int64_t across = (p.columns + c.tile.columns - 1) / c.tile.columns;
  Expect(inside == p.batch * down * across, name + "every tile is computed");
  const int32_t blocks = CtasOf(s, kH100);
  Expect(blocks % ranks == 0 && 0 < blocks && blocks <= kH100, name + "blocks come in pairs");
}

std::vector<TileShape> AllTileShapes() {
  std::vector<TileShape> all(std::begin(kTileShapes), std::end(kTileShapes));
  all.insert(all.end(), std::begin(kSumTileShapes), std::end(kSumTileShapes));
  all.insert(all.end(), std::begin(kMixedTileShapes), std::end(kMixedTileShapes));
  return all;
}

void CheckCovers() {
  for (const TileShape tile : AllTileShapes()) {
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      for (const Problem& p :
           {Product(1, 1, 1, 1), Product(3, 700, 300, 64), Product(2, 5000, 129, 16),
            Product(1, 4096, 2112, 7168), Product(5, 17, 4097, 100)}) {
        CheckCover(p, {tile, pair});
      }
    }
  }
}

// Neighbouring units of a group share rows of lhs or columns of rhs.
void CheckGroups() {
  const TileSchedule s = MakeSchedule(Product(1, 8192, 8192, 128), {{256, 128}, Pair::kSharesLhs});
  const TileCoord first = TileOf(s, 0, 0), next = TileOf(s, 1, 0), across = TileOf(s, 8, 1);
  Expect(first.row == 0 && next.row == 1 && next.column == 0, "rows come first");
  Expect(across.row == 0 && across.column == 3, "then columns, two tiles a pair");
}

void CheckChoices() {
  struct Row {
    int64_t rows, columns, depth;
    Configuration wanted;
    DType type = DType::kE4M3;
    bool highest = true;  // FP8 has two sets of sums
  };
  constexpr DType kS8 = DType::kS8;
  const Row kTable[] = {
      {4096, 8192, 8192, {{128, 256}, Pair::kNone}, kS8},
      {4096, 4096, 4096, {{128, 256}, Pair::kNone}, kS8},
      {2048, 5120, 5120, {{128, 128}, Pair::kSharesLhs}, kS8},
      {256, 8192, 8192, {{128, 128}, Pair::kNone}, kS8},
      {64, 8192, 8192, {{64, 64}, Pair::kNone}, kS8},
      {4096, 7168, 16384, {{256, 128}, Pair::kSharesLhs}},
      {4096, 4096, 7168, {{256, 128}, Pair::kSharesLhs}},
      {4096, 24576, 1536, {{256, 128}, Pair::kSharesLhs}},
      {4096, 7168, 2048, {{256, 128}, Pair::kSharesLhs}},
      {4096, 2112, 7168, {{128, 192}, Pair::kSharesRhs}},
      {4096, 32768, 512, {{256, 128}, Pair::kNone}},
      {512, 4096, 7168, {{128, 128}, Pair::kNone}},
      {64, 7168, 16384, {{64, 64}, Pair::kNone}},
      {64, 4096, 7168, {{64, 32}, Pair::kNone}},
      {1, 128, 128, {{64, 32}, Pair::kNone}},
      {4096, 8192, 8192, {{128, 256}, Pair::kNone}, DType::kE4M3, false},
      {256, 4096, 4096, {{64, 128}, Pair::kNone}, DType::kE4M3, false},
      {64, 14336, 4096, {{64, 128}, Pair::kNone}, DType::kE4M3, false},
  };
  for (const Row& row : kTable) {
    Problem p = Product(1, row.rows, row.columns, row.depth, row.type);
    p.highest = row.highest;
    const Configuration c = Choose(p, kH100);
    Expect(c.tile == row.wanted.tile && c.pair == row.wanted.pair,
           std::to_string(row.rows) + "x" + std::to_string(row.columns) + "x" +
               std::to_string(row.depth) + " gets " + NameOf(c));
  }
}

// bfloat16 times weights: those are lhs, as for the kernel.
Problem Weights(int64_t rows, int64_t columns, int64_t depth) {
  Problem p = Product(1, rows, columns, depth);
  p.lhs.dtype = DType::kBF16;
  return WithWeightsOnLeft(p);
}

void CheckWeights() {
  struct Row {
    int64_t rows, columns, depth;
    TileShape wanted;  // columns of weights, then rows of activations
  };
  const Row kTable[] = {
      {128, 28672, 8192, {256, 128}},  {256, 28672, 8192, {128, 256}},
      {1024, 28672, 8192, {128, 256}}, {4096, 28672, 8192, {128, 256}},
      {128, 14336, 4096, {128, 128}},  {256, 14336, 4096, {128, 256}},
      {4096, 4096, 4096, {128, 256}},
  };
  for (const Row& row : kTable) {
    const Problem p = Weights(row.rows, row.columns, row.depth);
    Expect(IsMixed(p) && !HasWeightsOnRight(p) && p.rows == row.columns, "weights are on the left");
    const Configuration c = ChooseMixed(p, kH100);
    Expect(c.tile == row.wanted && c.pair == Pair::kNone,
           std::to_string(row.rows) + " rows of " + std::to_string(row.columns) + "x" +
               std::to_string(row.depth) + " weights get " + NameOf(c));
  }
  const TileSchedule s = MakeMixedSchedule(Weights(1, 1, 65), {{128, 128}, Pair::kNone});
  Expect(s.steps == 2, "a step has 64 of K beside 16-bit values");
  const TmaOperands operands = OperandsOf(Weights(3, 5, 48));
  Expect(operands.lhs.LinePitch() == 48 && operands.rhs.LinePitch() == 96,
         "lines of 16-bit values have twice the bytes");
  Expect(!operands.lhs.copied && operands.workspace == 0, "aligned lines are read in place");
  Problem turned = Weights(3, 48, 40);
  turned.lhs.free_stride = 1, turned.lhs.depth_stride = 48, turned.lhs.zero_point = true;
  const TmaOperands lines = OperandsOf(turned);
  Expect(lines.lhs.mn_major && !lines.lhs.copied && lines.lhs.LinePitch() == 48 &&
             lines.lhs.BatchPitch() == 48 * 40 && lines.workspace == 0,
         "weights are read as lines of N, and nothing is summed for their zero points");
  Expect(OperandsOf(Weights(3, 5, 40)).lhs.copied && !OperandsOf(Weights(3, 5, 40)).rhs.copied,
         "lines are aligned by bytes");
}

// Every step of every unit belongs to one block, and who finishes a unit finds the other parts of
// it where it looks for them: each the first shared part of the block before.
void CheckParts(const Problem& p, TileShape tile, int32_t blocks, bool shares) {
  const Configuration c{tile, Pair::kNone};
  TileSchedule s = MakeMixedSchedule(p, c);
  ShareUnits(p, c, blocks, s);
  const std::string name = std::to_string(p.rows) + "x" + std::to_string(p.columns) + "x" +
                           std::to_string(p.depth) + " on " + std::to_string(blocks) + ": ";
  Expect((s.share > 0) == shares, name + (shares ? "units are shared" : "no unit is shared"));
  Expect((SharedUnitsBytes(s, tile, blocks) > 0) == shares, name + "sums need a workspace");
  std::vector<int32_t> computed(s.units, 0);
  std::vector<std::vector<Part>> parts(blocks);
  for (int32_t block = 0; block < blocks; ++block) {
    Parts<true> of_block(s, block, blocks);
    Part part;
    while (of_block.Next(s, part)) {
      Expect(0 <= part.first && part.first < part.end && part.end <= s.steps,
             name + "a part has steps");
      computed[part.unit] += part.end - part.first;
      parts[block].push_back(part);
    }
  }
  for (const int32_t steps : computed) Expect(steps == s.steps, name + "every step is computed");
  for (int32_t block = 0; block < blocks; ++block) {
    int32_t left_sums = 0;
    for (const Part& part : parts[block]) {
      left_sums += part.first > 0;
      if (part.first > 0) continue;
      int32_t at = part.end;
      for (int32_t other = block - 1; at < s.steps; --other) {
        const Part* found = nullptr;
        for (const Part& theirs : parts[other]) {
          if (theirs.first > 0) found = &theirs;
        }
        const bool fits = found && found->unit == part.unit && found->first == at;
        Expect(fits, name + "the block before has the next part");
        if (!fits) return;
        at = found->end;
      }
    }
    Expect(left_sums <= 1, name + "a block leaves sums once");
  }
}

void CheckSharedUnits() {
  CheckParts(Weights(512, 28672, 8192), {128, 256}, kH100, true);
  CheckParts(Weights(1024, 14336, 4096), {128, 256}, kH100, true);
  CheckParts(Weights(128, 4096, 4096), {128, 128}, kH100, true);
  CheckParts(Weights(128, 1024, 14336), {128, 128}, 113, true);
  CheckParts(Weights(256, 14336, 4096), {128, 256}, kH100, false);
  CheckParts(Weights(264, 33792, 4096), {128, 256}, kH100, false);
}

void CheckOperands() {
  Problem p = Product(2, 100, 60, 48);
  Expect(OperandsOf(p).workspace == 0, "aligned lines are read in place");
  p.rhs.free_stride = 1, p.rhs.depth_stride = 60;
  const TmaOperands turned = OperandsOf(p);
  Expect(!turned.lhs.copied && turned.rhs.copied, "a side that is not lines of K is copied");
  Expect(turned.workspace == 2 * 60 * 48, "as lines of K");
  const TmaOperands odd = OperandsOf(Product(1, 7, 5, 33));
  Expect(odd.lhs.copied && odd.lhs.LinePitch() == 48, "lines are padded to 16 bytes");
  Expect(odd.rhs.at % 256 == 0 && odd.rhs.at >= odd.lhs.CopiedBytes(), "copies do not overlap");
  const size_t bytes = odd.workspace;
  Expect(!WhyNotWorkspace(bytes - 1, bytes).ok() && WhyNotWorkspace(bytes, bytes).ok(),
         "the workspace holds them");
  Problem zeros = Product(1, 100, 60, 48, DType::kS8);
  Expect(OperandsOf(zeros).workspace == 0, "int8 is read in place");
  zeros.lhs.zero_point = true;
  const TmaOperands one_sided = OperandsOf(zeros);
  Expect(!one_sided.lhs.summed && one_sided.rhs.summed && one_sided.workspace == 4 * 60,
         "a zero point meets the sums of the other side");
  zeros.rhs.sums = true;
  Expect(OperandsOf(zeros).workspace == 0, "sums that are given are not made");
  zeros.rhs.sums = false;
  zeros.lhs.free_stride = 1, zeros.lhs.depth_stride = 100, zeros.rhs.zero_point = true;
  const TmaOperands both = OperandsOf(zeros);
  Expect(both.lhs.sums_at >= both.lhs.CopiedBytes() &&
             both.rhs.sums_at >= both.lhs.sums_at + both.lhs.SumsBytes() &&
             both.workspace == both.rhs.sums_at + 4 * 60,
         "sums do not overlap with copies");
  Problem shared = Product(4, 8, 8, 40);
  shared.rhs.batch_stride = 0;
  Expect(OperandsOf(shared).rhs.batches == 1, "a shared side is copied once");
}

void CheckDivisors() {
  constexpr int32_t kLargest = 2147483647;
  for (const int32_t by : {1, 2, 3, 7, 56, 127, 128, 641, 65537, 1 << 30, kLargest}) {
    const Divisor divisor(by);
    for (const int32_t n : {0, 1, by - 1, by, 2 * (by / 2) + 1, 1000003, kLargest - 1, kLargest}) {
      Expect(divisor.Quotient(n) == n / by, std::to_string(n) + " / " + std::to_string(by));
    }
  }
}

}  // namespace
}  // namespace jaxfp8::cuda::sm90

int main() {
  using namespace jaxfp8::cuda::sm90;
  CheckCovers();
  CheckGroups();
  CheckChoices();
  CheckWeights();
  CheckSharedUnits();
  CheckOperands();
  CheckDivisors();
  return jaxfp8::tests::Report("the schedule of sm90_gemm");
}
