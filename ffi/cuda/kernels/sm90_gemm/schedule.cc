#include "cuda/kernels/sm90_gemm/schedule.h"

#include <algorithm>

namespace jaxfp8::cuda::sm90 {
namespace {

// The time of a tile in clock cycles. On H100s the constants put the tile shape and the pair first
// that were fastest, or within 4 % of it, for six (N, K) with M = 4096, for M = 512 and M = 64.
constexpr double kProductsPerCycle = 4096;  // of the tensor cores of a multiprocessor
constexpr double kBytesPerCycle = 44;       // from L2, while all multiprocessors load
// For int8 128 x 256 without pairs is as fast as with them, or up to 8 % faster. It loads 48 bytes
// a cycle.
constexpr double kInt8BytesPerCycle = 48;
constexpr double kCyclesPerTile = 2000;  // filling the ring; what nothing hides of the epilogue
// What a tile waits for the other one of its pair, which loads a part for it.
constexpr double kPairCycles = 1000, kSharedRhsCycles = 300;
// Rows of lhs that are finished before the next, so that a turn of the blocks is about square.
constexpr int32_t kGroupLines = 2048;

int64_t Divide(int64_t size, int64_t part) { return (size + part - 1) / part; }

int32_t RowsOfUnit(const Configuration& c) {
  return c.tile.rows * (c.pair == Pair::kSharesRhs ? 2 : 1);
}
int32_t ColumnsOfUnit(const Configuration& c) {
  return c.tile.columns * (c.pair == Pair::kSharesLhs ? 2 : 1);
}

int32_t BlocksOfUnit(Pair pair) { return pair == Pair::kNone ? 1 : 2; }

// Bytes that a block loads from L2 for a step.
double LoadedBytes(const Configuration& c) {
  const double rows = c.tile.rows, columns = c.tile.columns;
  return kStepDepth * (rows / (c.pair == Pair::kSharesLhs ? 2 : 1) +
                       columns / (c.pair == Pair::kSharesRhs ? 2 : 1));
}

}  // namespace

std::span<const TileShape> TileShapesOf(const Problem& problem) {
  if (IsInt8(problem.lhs.dtype)) return kInt8TileShapes;
  return kTileShapes;
}

Schedule MakeSchedule(const Problem& problem, const Configuration& configuration) {
  Schedule s;
  s.row_units = static_cast<int32_t>(Divide(problem.rows, RowsOfUnit(configuration)));
  s.column_units = static_cast<int32_t>(Divide(problem.columns, ColumnsOfUnit(configuration)));
  s.units = s.row_units * s.column_units * static_cast<int32_t>(problem.batch);
  s.steps = static_cast<int32_t>(Divide(problem.depth, kStepDepth));
  s.pair = configuration.pair;
  if (s.units == 0) return s;
  s.group_rows = std::min(s.row_units, std::max(1, kGroupLines / RowsOfUnit(configuration)));
  s.units_per_batch = Divisor(s.row_units * s.column_units);
  s.units_per_group = Divisor(s.group_rows * s.column_units);
  s.rows_of_group = Divisor(s.group_rows);
  const int32_t left = s.row_units % s.group_rows;
  s.rows_of_last_group = Divisor(left == 0 ? s.group_rows : left);
  return s;
}

int32_t BlocksOf(const Schedule& schedule, int32_t multiprocessors) {
  const int32_t each = BlocksOfUnit(schedule.pair);
  return std::max(1, std::min(schedule.units, multiprocessors / each)) * each;
}

double CyclesOf(const Problem& problem, const Configuration& configuration,
                int32_t multiprocessors) {
  const Schedule s = MakeSchedule(problem, configuration);
  const double products = double{kStepDepth} * configuration.tile.rows * configuration.tile.columns;
  const double rate = IsInt8(problem.lhs.dtype) ? kInt8BytesPerCycle : kBytesPerCycle;
  const double step = std::max(products / kProductsPerCycle, LoadedBytes(configuration) / rate);
  const double waits = (s.pair == Pair::kNone ? 0 : kPairCycles) +
                       (s.pair == Pair::kSharesRhs ? kSharedRhsCycles : 0);
  const int32_t at_once = std::max(1, multiprocessors / BlocksOfUnit(s.pair));
  return static_cast<double>(Divide(s.units, at_once)) * (s.steps * step + kCyclesPerTile + waits);
}

Configuration Choose(const Problem& problem, int32_t multiprocessors) {
  Configuration best;
  double least = 0;
  for (const TileShape tile : TileShapesOf(problem)) {
    // With a tile for each multiprocessor, pairs were slower: 31.2 us, not 29.2, with 512 x 4096
    // outputs and K = 7168 on an H100.
    const bool pairs = MakeSchedule(problem, {tile, Pair::kNone}).units > multiprocessors;
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      if (pair != Pair::kNone && !pairs) continue;
      const Configuration configuration{tile, pair};
      const double cycles = CyclesOf(problem, configuration, multiprocessors);
      if (best.tile.rows != 0 && cycles >= least) continue;
      best = configuration, least = cycles;
    }
  }
  return best;
}

}  // namespace jaxfp8::cuda::sm90
