// The schedule of `sm80_w8a16`: how many blocks share an output tile, and which parts of K.

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

using tests::Expect;

void CheckSchedule(const SplitKSchedule& s, int64_t batch) {
  const std::string name = std::to_string(batch) + "x" + std::to_string(s.column_tiles) + "x" +
                           std::to_string(s.row_tiles) + "x" + std::to_string(s.depth_tiles) +
                           " by " + std::to_string(s.split) + ": ";
  Expect(s.split >= 1 && s.split <= kMaxSplit, name + "the blocks of a tile fit a cluster");
  Expect(s.split == 1 || s.split <= s.depth_tiles, name + "each block has a tile of K");
  for (int32_t output_tile = 0; output_tile < s.output_tiles; ++output_tile) {
    const OutputTile p = s.CoordOf(output_tile);
    Expect(p.batch < batch && p.column_tile < s.column_tiles && p.row_tile < s.row_tiles &&
               (p.batch * s.column_tiles + p.column_tile) * s.row_tiles + p.row_tile == output_tile,
           name + "an output has one place");
  }
}

Problem Some(int64_t batch, int64_t rows, int64_t columns, int64_t depth) {
  Problem p;
  p.batch = batch, p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = DType::kBF16, p.lhs.free_stride = depth, p.lhs.depth_stride = 1;
  p.rhs.dtype = DType::kE4M3, p.rhs.free_stride = depth, p.rhs.depth_stride = 1;
  p.out = {DType::kBF16, rows * columns, columns, 1};
  return p;
}

void CheckSchedules() {
  for (int64_t batch : {1, 3}) {
    for (int64_t rows : {1, 17, 64, 200}) {
      for (int64_t columns : {1, 129, 6144}) {
        for (int64_t depth : {0, 1, 128, 4100}) {
          for (int64_t multiprocessors : {1, 7, 132}) {
            const Problem p = Some(batch, rows, columns, depth);
            const Capacity capacity = CapacityOf(p, multiprocessors, 3, size_t{1} << 40);
            const SplitKSchedule s = MakeSchedule(p, capacity);
            Expect(s.output_tiles == OutputTiles(p), "a launch makes all outputs");
            Expect(s.split == 1 || s.output_tiles <= capacity.tiles[s.split],
                   "blocks that share tiles run at a time");
            CheckSchedule(s, batch);
          }
        }
      }
    }
  }
}

// What was fastest on an H100, or within 4 % of it, of all ways to split.
void CheckFastest() {
  struct Measured {
    int64_t columns, depth;
    int one_row, many_rows;  // blocks that share a tile, with 1 and with 64 rows
  };
  for (const Measured& m : {Measured{384, 384, 3, 3},
                            {384, 1536, 6, 6},
                            {1024, 4096, 8, 8},
                            {4096, 4096, 7, 7},
                            {6144, 4096, 4, 4},
                            {4096, 14336, 7, 7},
                            {14336, 4096, 2, 3},
                            {8192, 8192, 3, 5},
                            {28672, 8192, 1, 1},
                            {128256, 4096, 1, 1}}) {
    const std::string name = std::to_string(m.columns) + "x" + std::to_string(m.depth);
    const Problem one_row = Some(1, 1, m.columns, m.depth), rows = Some(1, 64, m.columns, m.depth);
    const SplitKSchedule one = MakeSchedule(one_row, CapacityOf(one_row, 132, 3, size_t{1} << 40));
    const SplitKSchedule many = MakeSchedule(rows, CapacityOf(rows, 132, 3, size_t{1} << 40));
    Expect(
        one.split == m.one_row && many.split == m.many_rows,
        name + " is split by " + std::to_string(one.split) + " and " + std::to_string(many.split));
  }
}

// The same with more rows, some of it more tiles than run at a time.
void CheckFastestInWaves() {
  struct Measured {
    int64_t rows, columns, depth;
    int split;
  };
  for (const Measured& m : {Measured{128, 14336, 4096, 1},
                            {256, 14336, 4096, 2},
                            {128, 28672, 8192, 2},
                            {256, 6144, 4096, 2},
                            {256, 4096, 4096, 2}}) {
    const Problem p = Some(1, m.rows, m.columns, m.depth);
    Capacity capacity = CapacityOf(p, 132, 3, size_t{1} << 40);
    capacity.tiles[3] = 120;  // as an H100 has it: not every multiprocessor has room for a third
    capacity.in_waves = true;
    const int split = MakeSchedule(p, capacity).split;
    Expect(split == m.split, std::to_string(m.rows) + " rows of " + std::to_string(m.columns) +
                                 " columns are split by " + std::to_string(split));
  }
}

// Without clusters, partial tiles fit the workspace that a call brings, at most a tenth of the
// weights.
void CheckWorkspace() {
  for (int64_t rows : {1, 8, 17, 64, 200}) {
    for (auto [columns, depth] :
         {std::pair(1, 1), {130, 300}, {1024, 4096}, {4096, 4100}, {28672, 8192}}) {
      const Problem p = Some(1, rows, columns, depth);
      const size_t best = BestWorkspace(p), weights = static_cast<size_t>(columns) * depth;
      Expect(10 * best <= weights, "the workspace is a tenth of the weights at most");
      for (size_t workspace : {size_t{0}, best, size_t{1} << 40}) {
        const SplitKSchedule s = MakeSchedule(p, CapacityOf(p, 108, 3, workspace));
        const size_t partials = static_cast<size_t>(s.split) * s.output_tiles;
        Expect(s.split == 1 || partials * PartialTileBytes(p) <= workspace,
               "the partial tiles fit");
        CheckSchedule(s, 1);
      }
    }
  }
  const Problem few = Some(1, 1, 4096, 4096);
  const SplitKSchedule given = MakeSchedule(few, CapacityOf(few, 108, 3, BestWorkspace(few)));
  const SplitKSchedule ample = MakeSchedule(few, CapacityOf(few, 108, 3, size_t{1} << 40));
  Expect(given.split == ample.split, "with one row more is no better");
}

void CheckTiles() {
  Problem p = Some(1, 64, 4096, 4096);
  Expect(RowFragmentsFor(p) == 8, "64 rows fit one tile");
  p.rhs.scale = true, p.rhs.tiles = {128, 128, 0, 32, 1};
  Expect(RowFragmentsFor(p) == 4, "scales that change along K halve the largest tile");
  for (int row_fragments : {1, 2, 4, 8}) {
    Expect(SharedBytes(row_fragments) <= 99 * 1024, "a block fits on every device from sm_80 on");
  }
}

// The output tiles of several products in one launch: each has its place, and there is no other.
void CheckParts() {
  for (const std::vector<int64_t>& columns :
       {std::vector<int64_t>{4096, 1024, 1024}, {1, 300}, {129}, {5, 128, 127, 1000}}) {
    std::vector<Problem> problems;
    for (int64_t n : columns) problems.push_back(Some(1, 3, n, 4100));
    const PartTiles tiles = PartTilesOf(problems);
    const Problem all = JointProblem(problems);
    const SplitKSchedule joint = MakeSchedule(all, CapacityOf(all, 132, 3, size_t{1} << 40));
    int32_t next = 0;
    for (size_t part = 0; part < problems.size(); ++part) {
      const SplitKSchedule own = PartSchedule(problems[part], joint);
      Expect(own.split == joint.split && own.depth_tiles == joint.depth_tiles, "one split for all");
      CheckSchedule(own, 1);
      for (int32_t tile = 0; tile < own.output_tiles; ++tile, ++next) {
        Expect(tiles.PartOf(next) == static_cast<int>(part) && next - tiles.first[part] == tile,
               "a tile belongs to its product");
      }
    }
    Expect(next == joint.output_tiles, "the launch has the tiles of all products");
  }
  const std::vector<Problem> small = {Some(1, 1, 4096, 4096), Some(1, 1, 2048, 4096)};
  const Problem one = Some(1, 1, 6144, 4096), both = JointProblem(small);
  const Capacity capacity = CapacityOf(one, 132, 3, size_t{1} << 40);
  Expect(MakeSchedule(both, capacity).split == MakeSchedule(one, capacity).split,
         "whole tiles are split as one weight is");
}

void CheckGated() {
  Device device;
  device.compute_capability = 90, device.shared_bytes = 227 * 1024;
  const Gate gate = {{DType::kBF16, DType::kBF16}};
  const auto refused = [&](const std::vector<Problem>& problems) {
    return !WhyNotGated(problems, gate, device).ok();
  };
  const Problem p = Some(1, 8, 300, 512);
  Expect(!refused({p, p}), "few rows may have a gate");
  Expect(refused({p}) && refused({p, p, p}), "a gate has two products");
  Expect(refused({p, Some(1, 8, 200, 512)}), "columns of a gate may not differ");
  Expect(!refused({Some(1, 9, 300, 512), Some(1, 9, 300, 512)}), "more rows may have one too");
  Problem zeros = p;
  zeros.rhs.zero_point = true, zeros.rhs.tiles = {1, 512, 0, 1, 0};
  Expect(refused({zeros, p}), "no zero points");
}

void CheckJointRefusals() {
  Device device;
  device.compute_capability = 90, device.shared_bytes = 227 * 1024;
  const auto refused = [&](const std::vector<Problem>& problems) {
    return !WhyNotJoint(problems, device).ok();
  };
  const Problem p = Some(1, 2, 256, 512);
  Expect(!refused({p}) && !refused({p, Some(1, 2, 7, 512)}), "columns may differ");
  Expect(refused({}) && refused({p, p, p, p, p}), "there are 1 to 4 products");
  Expect(refused({p, Some(1, 3, 256, 512)}), "rows may not differ");
  Expect(refused({p, Some(1, 2, 256, 500)}), "the depth may not differ");
  Expect(refused({p, Some(2, 2, 256, 512)}), "the batch may not differ");
  Expect(refused({p, Some(1, 2, 0, 512)}), "no product is empty");
  Problem other = p;
  other.rhs.dtype = DType::kE5M2;
  Expect(refused({p, other}), "the type of the weights may not differ");
  other = p, other.lhs.dtype = DType::kF16;
  Expect(refused({p, other}), "the type of the activations may not differ");
  other = p, other.rhs.free_stride = 1, other.rhs.depth_stride = 256;
  Expect(refused({p, other}), "the layout of the weights may not differ");
  other = Some(1, 64, 256, 512), other.rhs.scale = true, other.rhs.tiles = {128, 128, 0, 4, 1};
  Expect(refused({Some(1, 64, 256, 512), other}), "the rows of a tile may not differ");
  other = p, other.activation = Activation::kSilu, other.rhs.scale = true;
  Expect(!refused({p, other}), "scales and epilogues may differ");
  other = Some(4, 2, 256, 512), other.inner_batch = 2;
  Expect(refused({other, other}), "the batch may not have jumps");
  device.compute_capability = 89;
  Expect(refused({p, p}), "clusters are needed");
}

Problem InGroups(Grouping grouping, int64_t groups, int64_t rows) {
  Problem p = Some(groups, rows, 1536, 4096);
  p.grouping = grouping;
  p.rhs.batch_stride = 1536 * 4096, p.out.batch_stride = 0;
  return p;
}

void CheckGroups() {
  Device device;
  device.compute_capability = 90, device.shared_bytes = 227 * 1024;
  const Problem few = InGroups(Grouping::kContiguous, 64, 288);
  Expect(RowFragmentsFor(few) == 1, "a tile has room for most groups");
  Expect(OutputTiles(few) == (288 / 8 + 65) * 12, "each group may end in a tile that is not full");
  Expect(OutputTiles(InGroups(Grouping::kContiguous, 512, 10)) == 10 * 12,
         "fewer rows than groups are as many tiles");
  Expect(RowFragmentsFor(InGroups(Grouping::kContiguous, 4, 200)) == 8,
         "larger groups get larger tiles");
  const Capacity capacity = CapacityOf(few, 132, 3, size_t{1} << 40);
  Expect(MakeSchedule(few, capacity).row_tiles == 1, "weights are read once");
  Expect(WhyNotProblem(few, device).ok(), "groups of rows are taken");
  Expect(WhyNotProblem(InGroups(Grouping::kMasked, 4, 20), device).ok(), "masked ones too");
  Expect(!WhyNotProblem(InGroups(Grouping::kMasked, 4, 21), device).ok(), "of one size");
  Expect(!WhyNotProblem(InGroups(Grouping::kContracted, 4, 20), device).ok(),
         "groups of K are refused");
  Problem p = few;
  p.bias = {DType::kF32, 0, 0, 1};
  Expect(WhyNotProblem(p, device).ok(), "a bias of all groups is taken");
  p.bias.batch_stride = p.columns;
  Expect(WhyNotProblem(p, device).ok(), "a bias of each group, too");
  p.bias.row_stride = p.columns;
  Expect(!WhyNotProblem(p, device).ok(), "a bias of each row is refused");
  p = few, p.lhs.dtype = DType::kE4M3, p.rows = 10;
  Expect(!WhyNotProblem(p, device).ok(), "groups of 8-bit rows are refused");
}

void CheckRefusals() {
  Device device;
  device.compute_capability = 90, device.shared_bytes = 227 * 1024;
  Problem p = Some(1, 1, 256, 512);
  Expect(WhyNotProblem(p, device).ok(), "a plain problem is taken");
  p.rhs.scale = true, p.rhs.tiles = {1, 64, 0, 8, 1};
  Expect(WhyNotProblem(p, device).ok(), "tiles of 64 along the depth are taken");
  p.rhs.tiles = {1, 96, 0, 6, 1};
  Expect(!WhyNotProblem(p, device).ok(), "tiles of 96 along the depth are refused");
  p.rhs.tiles = {128, 128, 0, 4, 1};
  Expect(WhyNotProblem(p, device).ok(), "tiles of 128 x 128 are taken");
  p.rhs.tiles = {1, 512, 0, 1, 0};
  Expect(WhyNotProblem(p, device).ok(), "a scale for each column is taken");
  device.compute_capability = 75;
  Expect(!WhyNotProblem(p, device).ok(), "sm_75 is refused");
  device.compute_capability = 80;
  p.lhs.dtype = DType::kE4M3;
  p.rows = kMaxFloat8Rows, p.rhs.dtype = DType::kS8;
  Expect(!WhyNotProblem(p, device).ok(), "FP8 by int8 is refused");
  p.rhs.dtype = DType::kE5M2;
  Expect(WhyNotProblem(p, device).ok(), "few rows of e4m3 by FP8 are taken");
  Expect(WhyNotEither(Swapped(p), device).ok(), "on either side");
  p.rows = kMaxFloat8Rows + 1;
  Expect(!WhyNotProblem(p, device).ok(), "more rows are refused");
  p.rows = 1, p.lhs.dtype = DType::kE5M2;
  Expect(!WhyNotProblem(p, device).ok(), "rows of e5m2 are refused");
  p = Some(1, 1, 256, 512);
  p.out.dtype = DType::kS32;
  Expect(!WhyNotProblem(p, device).ok(), "an int32 output is refused");
  Expect(WhyNotForm(Some(1, 1, 256, 512)).ok(), "without a device too");
  p = Some(2 * 65535, 1, 256, 512);
  p.inner_batch = 2, p.rhs.batch_jump = 1;
  Expect(WhyNotProblem(p, device).ok(), "a batch with jumps is taken");
  p.batch += 2;
  Expect(!WhyNotProblem(p, device).ok(), "but not more than a grid has along its third axis");
  p = Some(4, 1, 256, 512), p.inner_batch = 2, p.lhs.batch_jump = 1;
  Expect(!WhyNotProblem(p, device).ok(), "jumps of activations are refused");
  p = Some(1, 1, 1 << 20, 512);
  p.rhs.scale = true, p.rhs.tiles = {1, 512, 0, (1 << 11) - 1, 0};
  Expect(WhyNotProblem(p, device).ok(), "columns whose scales lie far apart are taken");
  ++p.rhs.tiles.free_stride;
  Expect(!WhyNotProblem(p, device).ok(), "but not further than 32 bits count");
  p = Some(int64_t{1} << 30, 1 << 20, 1 << 20, 1 << 20);
  Expect(!WhyNotProblem(p, device).ok(), "more tiles than 32 bits count are refused");
}

}  // namespace
}  // namespace jaxfp8::cuda::w8a16

int main() {
  using namespace jaxfp8::cuda::w8a16;
  CheckSchedules();
  CheckFastest();
  CheckFastestInWaves();
  CheckWorkspace();
  CheckTiles();
  CheckParts();
  CheckGated();
  CheckJointRefusals();
  CheckGroups();
  CheckRefusals();
  return jaxfp8::tests::Report("w8a16 schedule");
}
