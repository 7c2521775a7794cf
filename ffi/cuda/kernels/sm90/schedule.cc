#include "cuda/kernels/sm90_gemm/schedule.h"

#include <algorithm>
#include <utility>

#include "cuda/kernels/sm90_gemm/operands.h"

namespace jaxfp8::cuda::sm90 {
namespace {

// The time of a tile in clock cycles. On H100s the constants put the tile shape and the pair first
// that were fastest, or within 4 % of it, for six (N, K) with M = 4096, for M = 512 and M = 64.
constexpr double kProductsPerCycle = 4096;  // of the tensor cores of a multiprocessor
constexpr double kBytesPerCycle = 44;       // from L2, while all multiprocessors load
// With one set of sums (timed with int8) 128 x 256 without pairs is as fast as with them, or up to
// 8 % faster. It loads 48 bytes a cycle.
constexpr double kSumBytesPerCycle = 48;
// With 16-bit values a column takes twice as long; and tiles of less than 256 columns longer still,
// since each fragment is decoded for fewer products. On an H100 a tile of 128 x 256 takes 43 us
// with K = 4096, one of 256 x 128 53 us, one of 128 x 128 34 us.
constexpr double kMixedProductsPerCycle = 2048, kNarrowMixed = 1.3, kSmallMixed = 1.6;
constexpr int32_t kWideColumns = 256;
// The factor for groups of 16-bit values, whose tiles of 256 overlap: blocks load the same lines at
// the same time. On an H200 64 groups of 192 on average take 374 us by tiles of 256 x 128 and 413
// by those of 128 x 256, with K = 4096; 8 groups of 1024 take 791 and 672, with K = 7168.
constexpr double kGroupedWide = 1.15;
constexpr double kCyclesPerTile = 2000;  // filling the ring; the epilogue
// What a tile waits for the other one of its pair, which loads a part for it.
constexpr double kPairCycles = 1000;
// What shared units take beside their steps: counters are cleared before, and the sums of a tile go
// through memory. On an H100 14 us for tiles of 128 x 256, 9 us for half of that.
constexpr double kShareCycles = 12000, kShareCyclesPerOutput = 0.5;
// Steps that are counted in 32 bits.
constexpr int64_t kMaxSharedSteps = int64_t{1} << 30;
// Rows of lhs that are finished before the next, so that a turn of the blocks is about square.
constexpr int32_t kBandRows = 2048;

int64_t Divide(int64_t size, int64_t part) { return (size + part - 1) / part; }

int32_t RowsOfUnit(const Configuration& c) {
  return c.tile.rows * (c.pair == Pair::kSharesRhs ? 2 : 1);
}
int32_t ColumnsOfUnit(const Configuration& c) {
  return c.tile.columns * (c.pair == Pair::kSharesLhs ? 2 : 1);
}

int32_t BlocksOfUnit(Pair pair) { return pair == Pair::kNone ? 1 : 2; }

double ProductsPerCycle(const Problem& problem, TileShape tile) {
  if (!IsMixed(problem)) return kProductsPerCycle;
  if (tile.columns >= kWideColumns) return kMixedProductsPerCycle;
  return kMixedProductsPerCycle / (tile.rows > 128 ? kNarrowMixed : kSmallMixed);
}

int32_t StepDepth(const Problem& problem) { return IsMixed(problem) ? kMixedDepth : kStepDepth; }

// Bytes that a block loads from L2 for a step.
double LoadedBytes(const Problem& problem, const Configuration& c) {
  const double rows = c.tile.rows * SizeOf(problem.lhs.dtype);
  const double columns = c.tile.columns * SizeOf(problem.rhs.dtype);
  return StepDepth(problem) * (rows / (c.pair == Pair::kSharesLhs ? 2 : 1) +
                               columns / (c.pair == Pair::kSharesRhs ? 2 : 1));
}

// The estimated time of a step, of a tile beside its steps, and of sharing.
struct Times {
  double step, tile, share;
};

Times TimesOf(const Problem& problem, const Configuration& c) {
  const double products = double{1} * StepDepth(problem) * c.tile.rows * c.tile.columns;
  const double rate = SumsFirst(problem) ? kSumBytesPerCycle : kBytesPerCycle;
  const double waits = c.pair == Pair::kNone ? 0 : kPairCycles;
  return {std::max(products / ProductsPerCycle(problem, c.tile), LoadedBytes(problem, c) / rate),
          kCyclesPerTile + waits,
          kShareCycles + kShareCyclesPerOutput * c.tile.rows * c.tile.columns};
}

// The units that are shared: those of the last turn, which is not full, and of the one before.
int32_t SharedUnits(const Schedule& s, int32_t blocks) {
  const int32_t left = s.units % blocks;
  return left == 0 ? 0 : std::min(s.units, left + blocks);
}

// The estimated time without shared units, and with them.
double CyclesAlone(const Schedule& s, const Times& t, int32_t at_once) {
  return static_cast<double>(Divide(s.units, at_once)) * (s.steps * t.step + t.tile);
}
double CyclesShared(const Schedule& s, const Times& t, int32_t blocks) {
  const int32_t shared = SharedUnits(s, blocks);
  const double whole = (s.units - shared) / blocks;
  const double share = static_cast<double>(Divide(int64_t{shared} * s.steps, blocks));
  return whole * (s.steps * t.step + t.tile) + share * t.step + 2 * t.tile + t.share;
}

// How many units of groups there are is known on the device alone, so they are not shared.
bool MayShare(const Problem& problem, const Configuration& c, const Schedule& s, int32_t blocks) {
  const int64_t steps = int64_t{SharedUnits(s, blocks)} * s.steps;
  return IsMixed(problem) && problem.grouping == Grouping::kNone && c.pair == Pair::kNone &&
         steps > 0 && steps <= kMaxSharedSteps;
}

}  // namespace

std::span<const TileShape> TileShapesOf(const Problem& problem) {
  if (IsMixed(problem)) return kMixedTileShapes;
  if (SumsFirst(problem)) return kSumTileShapes;
  return kTileShapes;
}

Schedule MakeSchedule(const Problem& problem, const Configuration& configuration) {
  if (GroupsRows(problem) && IsMixed(problem) && !HasWeightsOnRight(problem)) {
    const TileShape tile = configuration.tile;
    return MakeSchedule(Swapped(problem), {{tile.columns, tile.rows}, configuration.pair});
  }
  Schedule s;
  s.column_units = static_cast<int32_t>(Divide(problem.columns, ColumnsOfUnit(configuration)));
  s.steps = static_cast<int32_t>(Divide(problem.depth, StepDepth(problem)));
  s.pair = configuration.pair;
  s.grouped = GroupsOf(problem, RowsOfUnit(configuration));
  if (GroupsRows(problem)) {
    s.row_units = static_cast<int32_t>(MostUnits(s.grouped));
    s.units = s.row_units * s.column_units;
  } else {
    s.row_units = static_cast<int32_t>(Divide(problem.rows, RowsOfUnit(configuration)));
    s.units = s.row_units * s.column_units * static_cast<int32_t>(problem.batch);
  }
  if (s.units == 0) return s;
  s.band_rows = std::min(s.row_units, std::max(1, kBandRows / RowsOfUnit(configuration)));
  s.whole_units = s.units;
  s.steps_of_unit = Divisor(s.steps);
  s.units_per_batch = Divisor(s.row_units * s.column_units);
  s.units_per_band = Divisor(s.band_rows * s.column_units);
  s.rows_of_band = Divisor(s.band_rows);
  const int32_t left = s.row_units % s.band_rows;
  s.rows_of_last_band = Divisor(left == 0 ? s.band_rows : left);
  return s;
}

void ShareUnits(const Problem& problem, const Configuration& configuration, int32_t blocks,
                Schedule& s) {
  if (!MayShare(problem, configuration, s, blocks)) return;
  const Times times = TimesOf(problem, configuration);
  if (CyclesShared(s, times, blocks) >= CyclesAlone(s, times, blocks)) return;
  const int32_t shared = SharedUnits(s, blocks);
  s.whole_units = s.units - shared;
  s.share = static_cast<int32_t>(Divide(int64_t{shared} * s.steps, blocks));
}

size_t SharedUnitsBytes(const Schedule& schedule, TileShape tile, int32_t blocks) {
  if (schedule.share == 0) return 0;
  return static_cast<size_t>(blocks) *
         (kCounterBytes + sizeof(float) * static_cast<size_t>(tile.rows) * tile.columns);
}

int32_t BlocksOf(const Schedule& schedule, int32_t multiprocessors) {
  const int32_t each = BlocksOfUnit(schedule.pair);
  const int32_t units = schedule.share > 0 ? multiprocessors : schedule.units;
  return std::max(1, std::min(units, multiprocessors / each)) * each;
}

double CyclesOf(const Problem& problem, const Configuration& configuration,
                int32_t multiprocessors) {
  const Schedule s = MakeSchedule(problem, configuration);
  const Times times = TimesOf(problem, configuration);
  const double alone = CyclesAlone(s, times, std::max(1, multiprocessors / BlocksOfUnit(s.pair)));
  if (!MayShare(problem, configuration, s, multiprocessors)) return alone;
  return std::min(alone, CyclesShared(s, times, multiprocessors));
}

// The same for weights times groups of 16-bit values, whose sizes are random: each ends in the
// middle of a tile, and the last turn of the blocks may have few.
double CyclesOfGroups(const Problem& problem, TileShape tile, int32_t multiprocessors) {
  const auto columns = static_cast<double>(problem.columns);
  const double groups = std::max(1.0, std::min(columns, static_cast<double>(problem.batch)));
  const double across = std::max(1.0, columns / groups / tile.columns + 0.5);
  const double units = groups * across * static_cast<double>(Divide(problem.rows, tile.rows));
  const Times times = TimesOf(problem, {tile, Pair::kNone});
  const double step = times.step * (tile.columns >= kWideColumns ? kGroupedWide : 1);
  const auto steps = static_cast<double>(Divide(problem.depth, kMixedDepth));
  return (units / multiprocessors + 0.5) * (steps * step + times.tile);
}

Configuration Choose(const Problem& given, int32_t multiprocessors) {
  const Problem problem = WithEvenGroups(given);
  Configuration best;
  std::pair<double, double> least;
  // Pairs were no faster with 16-bit values.
  const bool mixed = IsMixed(problem);
  for (const TileShape tile : TileShapesOf(problem)) {
    // With a tile for each multiprocessor, pairs were slower: 31.2 us, not 29.2, with 512 x 4096
    // outputs and K = 7168 on an H100.
    const bool pairs = MakeSchedule(problem, {tile, Pair::kNone}).units > multiprocessors;
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      if (pair != Pair::kNone && (!pairs || mixed)) continue;
      const Configuration configuration{tile, pair};
      // Of two that take as long, the one that loads less: tiles of 128 x 192 were 3 % faster in
      // pairs that share rhs than in pairs that share lhs.
      const double cycles = mixed && GroupsRows(given)
                                ? CyclesOfGroups(given, tile, multiprocessors)
                                : CyclesOf(problem, configuration, multiprocessors);
      const std::pair cost(cycles, LoadedBytes(problem, configuration));
      if (best.tile.rows != 0 && cost >= least) continue;
      best = configuration, least = cost;
    }
  }
  return best;
}

}  // namespace jaxfp8::cuda::sm90
