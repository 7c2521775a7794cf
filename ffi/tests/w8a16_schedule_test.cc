// The schedule of `sm80_w8a16`: every iteration belongs to one block, an output tile knows the
// blocks that share it, and no two blocks store into one partial tile.

#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "tests/expect.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

using tests::Expect;

// Runs the iterations of all blocks as the kernel does, and checks what they store.
void CheckSchedule(const Schedule& s, int64_t batch) {
  const std::string name = std::to_string(batch) + "x" + std::to_string(s.column_tiles) + "x" +
                           std::to_string(s.row_tiles) + "x" + std::to_string(s.depth_tiles) +
                           " on " + std::to_string(s.blocks) + ": ";
  Expect(s.Begin(0) == 0 && s.Begin(s.blocks) == s.Iterations(),
         name + "blocks cover all iterations");
  std::map<int64_t, int> parts;  // of an output
  std::set<int64_t> partials;
  for (int32_t block = 0; block < s.blocks; ++block) {
    Expect(s.Begin(block) < s.Begin(block + 1), name + "no block is idle");
    for (int32_t iteration = s.Begin(block); iteration < s.Begin(block + 1); ++iteration) {
      Expect(s.BlockOf(iteration) == block, name + "an iteration knows its block");
      const int32_t output_tile = iteration / s.depth_tiles;
      const bool ends = iteration + 1 == s.Begin(block + 1) || (iteration + 1) % s.depth_tiles == 0;
      if (!ends) continue;
      ++parts[output_tile];
      const int64_t partial = s.PartialOf(block, output_tile);
      Expect(partials.insert(partial).second, name + "every partial tile has a place of its own");
      Expect(partial < s.Partials(), name + "partial tiles are counted");
      Expect(s.FirstBlock(output_tile) <= block && block <= s.LastBlock(output_tile),
             name + "a sharer is among the sharers");
    }
  }
  for (int32_t output_tile = 0; output_tile < s.output_tiles; ++output_tile) {
    Expect(parts[output_tile] == s.LastBlock(output_tile) - s.FirstBlock(output_tile) + 1,
           name + "as many parts are added up as there are");
    const TileCoord p = s.CoordOf(output_tile);
    Expect(p.batch < batch && p.column_tile < s.column_tiles && p.row_tile < s.row_tiles &&
               (p.batch * s.column_tiles + p.column_tile) * s.row_tiles + p.row_tile ==
                   s.first + output_tile,
           name + "an output has one place");
  }
}

// Checks all launches of a problem; returns how many there are.
int CheckLaunches(const Problem& p, int64_t blocks_at_once, size_t workspace) {
  const int64_t output_tiles = OutputTiles(p);
  int launches = 0;
  Expect(WhyNotWorkspace(p, 0, workspace).empty(), "enough workspace is accepted");
  for (int64_t first = 0; first < output_tiles; ++launches) {
    const Schedule s = MakeSchedule(p, blocks_at_once, workspace, first);
    Expect(s.output_tiles > 0 && first + s.output_tiles <= output_tiles,
           "a launch makes some of the outputs");
    Expect(s.blocks <= blocks_at_once, "all blocks are resident at a time");
    if (p.depth > 0) {
      Expect(static_cast<size_t>(s.Partials()) * PartialTileBytes(p) <= workspace,
             "the partial tiles fit");
      CheckSchedule(s, p.batch);
    }
    first += s.output_tiles;
  }
  return launches;
}

Problem Some(int64_t batch, int64_t rows, int64_t columns, int64_t depth) {
  Problem p;
  p.batch = batch, p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = DType::kBF16, p.lhs.free = depth, p.lhs.depth = 1;
  p.rhs.dtype = DType::kE4M3, p.rhs.free = depth, p.rhs.depth = 1;
  p.out = {DType::kBF16, rows * columns, columns, 1};
  return p;
}

void CheckSchedules() {
  for (int64_t batch : {1, 3}) {
    for (int64_t rows : {1, 17, 200}) {
      for (int64_t columns : {1, 129, 6144}) {
        for (int64_t depth : {0, 1, 128, 4100}) {
          for (int64_t blocks_at_once : {1, 7, 132, 396}) {
            const Problem p = Some(batch, rows, columns, depth);
            const int launches = CheckLaunches(p, blocks_at_once, size_t{32} << 20);
            Expect(launches == 1 || rows == 200, "32 MiB suffice for few rows");
          }
        }
      }
    }
  }
}

void CheckWorkspace() {
  const Problem p = Some(1, 64, 4096, 4096);
  Expect(!WhyNotWorkspace(p, 0, 1000).empty(), "too little workspace is refused");
  for (size_t workspace : {size_t{70000}, size_t{1} << 20, size_t{32} << 20}) {
    CheckLaunches(p, 264, workspace);
  }
}

// The workspace that a call is told to bring suffices for one launch.
void CheckBestWorkspace() {
  for (int64_t rows : {1, 8, 17, 64, 200}) {
    for (auto [columns, depth] : {std::pair(1, 1), {130, 300}, {4096, 4100}, {28672, 8192}}) {
      const Problem p = Some(1, rows, columns, depth);
      const size_t best = BestWorkspace(p);
      const size_t packed = PacksActivations(RowFragmentsFor(p)) ? PackedBytesOf(p) : 0;
      for (int64_t blocks_at_once : {1, 132, 216, 396, 444}) {
        const Schedule s = MakeSchedule(p, blocks_at_once, best - packed, 0);
        const Schedule ample = MakeSchedule(p, blocks_at_once, size_t{1} << 40, 0);
        Expect(s.output_tiles == ample.output_tiles && s.blocks == ample.blocks,
               "more is no better");
        Expect(s.output_tiles == OutputTiles(p), "one launch makes all outputs");
      }
      // Also on a device larger than any that exists.
      const Schedule s = MakeSchedule(p, 528, best - packed, 0);
      Expect(s.output_tiles == OutputTiles(p), "one launch makes all outputs on a larger device");
      CheckSchedule(s, p.batch);
    }
  }
  const Problem weights = Some(1, 1, 14336, 4096);
  Expect(BestWorkspace(weights) < size_t{14336} * 4096 / 100, "one row takes a hundredth");
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

void CheckRefusals() {
  Device device;
  device.compute_capability = 90, device.shared_bytes = 227 * 1024;
  Problem p = Some(1, 1, 256, 512);
  Expect(WhyNotProblem(p, device).empty(), "a plain problem is taken");
  p.rhs.scale = true, p.rhs.tiles = {1, 64, 0, 8, 1};
  Expect(!WhyNotProblem(p, device).empty(), "tiles of 64 along the depth are refused");
  p.rhs.tiles = {128, 128, 0, 4, 1};
  Expect(WhyNotProblem(p, device).empty(), "tiles of 128 x 128 are taken");
  p.rhs.tiles = {1, 512, 0, 1, 0};
  Expect(WhyNotProblem(p, device).empty(), "a scale for each column is taken");
  device.compute_capability = 75;
  Expect(!WhyNotProblem(p, device).empty(), "sm_75 is refused");
  device.compute_capability = 80;
  p.lhs.dtype = DType::kE4M3;
  Expect(!WhyNotProblem(p, device).empty(), "two 8-bit sides are refused");
  p = Some(1, 1, 256, 512);
  p.out.dtype = DType::kS32;
  Expect(!WhyNotProblem(p, device).empty(), "an int32 output is refused");
  Expect(WhyNotForm(Some(1, 1, 256, 512)).empty(), "without a device too");
  p = Some(int64_t{1} << 30, 1 << 20, 1 << 20, 1 << 20);
  Expect(!WhyNotProblem(p, device).empty(), "more tiles than 32 bits count are refused");
}

}  // namespace
}  // namespace jaxfp8::cuda::w8a16

int main() {
  using namespace jaxfp8::cuda::w8a16;
  CheckSchedules();
  CheckWorkspace();
  CheckBestWorkspace();
  CheckTiles();
  CheckRefusals();
  return jaxfp8::tests::Report("w8a16 schedule");
}
