// Groups in the schedule of `sm90_gemm`. Of rows: each row and column of the output belongs to one
// tile, of the group that has the row, whatever the sizes. Of the contracted axis: each value of it
// is summed in the output of its group, and no other.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/sm90/groups.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_gemm/schedule.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::sm90 {
namespace {

using tests::Expect;

constexpr int32_t kH100 = 132;

Problem Grouped(Grouping grouping, int64_t groups, int64_t rows, int64_t columns) {
  Problem p;
  p.batch = groups, p.rows = rows, p.columns = columns, p.depth = 256;
  p.grouping = grouping;
  p.lhs.dtype = p.rhs.dtype = DType::kE4M3;
  p.lhs.free_stride = p.rhs.free_stride = p.depth, p.lhs.depth_stride = p.rhs.depth_stride = 1;
  p.rhs.batch_stride = columns * p.depth;
  return p;
}

// The group of each row, or -1.
std::vector<int32_t> GroupOfRows(const Problem& p, const std::vector<int32_t>& sizes) {
  std::vector<int32_t> groups(p.rows, -1);
  int64_t row = 0;
  const int64_t each = p.rows / p.batch;
  for (int32_t group = 0; group < p.batch; ++group) {
    if (p.grouping == Grouping::kMasked) row = group * each;
    const int64_t end = p.grouping == Grouping::kMasked ? row + each : p.rows;
    for (int32_t i = 0; i < sizes[group] && row < end; ++i) groups[row++] = group;
  }
  return groups;
}

void CheckCover(const Problem& p, const Configuration& c, const std::vector<int32_t>& sizes) {
  std::string name = p.grouping == Grouping::kMasked ? "masked" : "contiguous";
  for (const int32_t size : sizes) name += " " + std::to_string(size);
  name += " of " + std::to_string(p.rows) + "x" + std::to_string(p.columns) + " by " +
          std::to_string(c.tile.rows) + "x" + std::to_string(c.tile.columns) + ": ";
  // Tiles of weights, which are on the left of 16-bit values, are of the transposed output.
  const TileShape tile = IsMixed(p) ? TileShape{c.tile.columns, c.tile.rows} : c.tile;
  const TileSchedule s =
      IsMixed(p) ? MakeMixedSchedule(WithWeightsOnLeft(p), c) : MakeSchedule(p, c);
  const std::vector<int32_t> groups = GroupOfRows(p, sizes);
  std::vector<int32_t> computed(p.rows * p.columns, 0);
  const int32_t ranks = c.pair == Pair::kNone ? 1 : 2;
  GroupCursor cursors[2];
  bool right = true, sums_first = true, had_zeros = false, ended = false;
  for (int32_t unit = 0; unit < s.units; ++unit) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      TileBounds b;
      if (!cursors[rank].Find(s, sizes.data(), tile, unit, rank, b)) {
        ended = true;
        continue;
      }
      right &= !ended;
      had_zeros |= !b.sums, sums_first &= !(b.sums && had_zeros);
      for (int32_t row = b.row; row < std::min(b.end, b.row + tile.rows); ++row) {
        const int32_t group = b.sums ? b.batch : -1;
        right &= 0 <= row && row < p.rows && groups[row] == group;
        for (int64_t column = b.column;
             column < std::min<int64_t>(p.columns, b.column + tile.columns); ++column) {
          ++computed[row * p.columns + column];
        }
      }
    }
  }
  TileBounds none;
  Expect(!cursors[0].Find(s, sizes.data(), tile, s.units, 0, none),
         name + "there are no more units than the bound");
  Expect(right, name + "rows of a tile are of its group");
  Expect(sums_first, name + "what sums comes before zeros");
  Expect(std::all_of(computed.begin(), computed.end(), [](int32_t n) { return n == 1; }),
         name + "every output is computed once");
}

void CheckCovers() {
  constexpr int32_t kLargest = 2147483647;
  const std::vector<int32_t> kSizes[] = {
      {700},          {0},         {3, 0, 129, 1},     {256, 256, 188, 0},
      {0, 0, 0, 700}, {1, 1, 1},   {300, 500, 200},    {kLargest, kLargest, 5},
      {-5, 64, -1},   {64, 0, 65}, {0, 0, 0, 0, 0, 0},
  };
  for (const std::vector<int32_t>& sizes : kSizes) {
    const auto groups = static_cast<int64_t>(sizes.size());
    for (const TileShape tile : kMixedTileShapes) {
      Problem p = Grouped(Grouping::kContiguous, groups, 700, 300);
      p.lhs.dtype = DType::kBF16;
      CheckCover(p, {tile, Pair::kNone}, sizes);
      p.grouping = Grouping::kMasked, p.rows = 150 * groups;
      CheckCover(p, {tile, Pair::kNone}, sizes);
    }
  }
  for (const TileShape tile : kTileShapes) {
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      for (const std::vector<int32_t>& sizes : kSizes) {
        const auto groups = static_cast<int64_t>(sizes.size());
        for (const int64_t columns : {1, 300}) {
          CheckCover(Grouped(Grouping::kContiguous, groups, 700, columns), {tile, pair}, sizes);
          CheckCover(Grouped(Grouping::kMasked, groups, 150 * groups, columns), {tile, pair},
                     sizes);
        }
      }
    }
  }
  // More rows than those that are finished before the next ones.
  CheckCover(Grouped(Grouping::kContiguous, 3, 6000, 260), {{256, 128}, Pair::kSharesLhs},
             {5000, 17, 600});
}

// A block takes every so many units, and finds each where one that takes them all does.
void CheckSteps() {
  const Problem p = Grouped(Grouping::kMasked, 40, 40 * 300, 300);
  std::vector<int32_t> sizes(40);
  for (int32_t i = 0; i < 40; ++i) sizes[i] = i * 89 % 301;
  const Configuration c{{64, 128}, Pair::kNone};
  const TileSchedule s = MakeSchedule(p, c);
  for (const int32_t stride : {2, 7, 132}) {
    GroupCursor all, some;
    for (int32_t unit = 0; unit < s.units; ++unit) {
      TileBounds wanted, got;
      const bool found = all.Find(s, sizes.data(), c.tile, unit, 0, wanted);
      if (unit % stride != 0) continue;
      Expect(some.Find(s, sizes.data(), c.tile, unit, 0, got) == found, "units end alike");
      Expect(!found || (got.row == wanted.row && got.end == wanted.end &&
                        got.column == wanted.column && got.batch == wanted.batch),
             "a tile is found in steps of " + std::to_string(stride));
    }
  }
}

// The values of the contracted axis that a group sums, in the steps of its units, with and without
// the mask.
void CheckDepths() {
  constexpr int32_t kLargest = 2147483647, kDepth = 700;
  const std::vector<int32_t> kSizes[] = {
      {700},       {0},           {3, 0, 129, 1},     {128, 256, 128, 0},
      {0, 0, 300}, {kLargest, 5}, {-5, 64, 200, 500},
  };
  for (const std::vector<int32_t>& sizes : kSizes) {
    Problem p = Grouped(Grouping::kContracted, static_cast<int64_t>(sizes.size()), 300, 200);
    p.depth = p.lhs.free_stride = p.rhs.free_stride = kDepth, p.rhs.batch_stride = 0;
    const TileSchedule s = MakeSchedule(p, {{128, 128}, Pair::kNone});
    Expect(s.units == 6 * p.batch, "each group has an output");
    for (const int32_t stride : {1, 4, 7}) {
      GroupCursor cursor;
      for (int32_t unit = 0; unit < s.units; unit += stride) {
        const int32_t group = TileOf(s, unit, 0).batch;
        int64_t first = 0;
        for (int32_t i = 0; i < group; ++i)
          first += std::clamp<int64_t>(sizes[i], 0, kDepth - first);
        const int64_t end = first + std::clamp<int64_t>(sizes[group], 0, kDepth - first);
        const DepthRange range = cursor.DepthOf(s.grouped, sizes.data(), group);
        Expect(range.first == first && range.end == end, "a group has its values");
      }
    }
  }
  const DepthRange range{130, 384};
  Expect(
      range.Cuts(1) && !range.Cuts(2) && DepthRange{100, 120}.Cuts(0) && DepthRange{0, 383}.Cuts(2),
      "a step is masked where a group begins or ends in it");
  Expect(!DepthRange{}.Cuts(0) && !DepthRange{}.Cuts(1 << 20), "without groups no step is masked");
  Expect(Choose(Grouped(Grouping::kContracted, 8, 4096, 4096), kH100).tile.rows >= 128,
         "large outputs get large tiles");
}

void CheckChoice() {
  const Configuration even = Choose(Grouped(Grouping::kContiguous, 8, 8192, 4096), kH100);
  Expect(even.tile.rows * even.tile.columns == 256 * 128, "large groups get large tiles");
  const Configuration few = Choose(Grouped(Grouping::kContiguous, 256, 8192, 4096), kH100);
  Expect(few.tile.rows < 256, "small groups get tiles of fewer rows");
  Problem mixed = Grouped(Grouping::kContiguous, 64, 64 * 256, 1408);
  mixed.lhs.dtype = DType::kBF16, mixed.depth = 2048;
  mixed = WithWeightsOnLeft(mixed);
  Expect(WithEvenGroups(mixed).columns == 256, "groups of 16-bit values are columns");
  Expect(ChooseMixed(mixed, kH100).tile == TileShape{128, 256},
         "of which a tile has room for a group");
  TileSchedule s = MakeMixedSchedule(mixed, ChooseMixed(mixed, kH100));
  ShareUnits(mixed, ChooseMixed(mixed, kH100), kH100, s);
  Expect(s.share == 0 && s.whole_units == s.units, "units of groups are not shared");
  Expect(MakeSchedule(Grouped(Grouping::kContiguous, 4, 0, 100), even).units == 0,
         "without rows there is nothing to do");
}

}  // namespace
}  // namespace jaxfp8::cuda::sm90

int main() {
  using namespace jaxfp8::cuda::sm90;
  CheckCovers();
  CheckSteps();
  CheckDepths();
  CheckChoice();
  return jaxfp8::tests::Report("groups in sm90_gemm");
}
