#include "cuda/kernels/sm90/schedule.h"

#include <algorithm>

#include "common/sizes.h"

namespace jaxfp8::cuda::sm90 {
namespace {

// The time of a tile in clock cycles. On H100s the constants, and those of `Rates`, put the tile
// shape and the pair first that were fastest, or within 4 % of it, for six (N, K) with M = 4096,
// for M = 512 and M = 64.
constexpr double kCyclesPerTile = 2000;  // filling the ring; the epilogue
// What a tile waits for the other one of its pair, which loads a part for it.
constexpr double kPairCycles = 1000;
// Rows of lhs that are finished before the next, so that a turn of the CTAs is about square.
constexpr int32_t kBandRows = 2048;

int32_t RowsOfUnit(const Configuration& c) {
  return c.tile.rows * (c.pair == Pair::kSharesRhs ? 2 : 1);
}
int32_t ColumnsOfUnit(const Configuration& c) {
  return c.tile.columns * (c.pair == Pair::kSharesLhs ? 2 : 1);
}

int32_t CtasOfUnit(Pair pair) { return pair == Pair::kNone ? 1 : 2; }

}  // namespace

TileSchedule MakeSchedule(const Problem& problem, const Configuration& configuration,
                          int32_t depth) {
  TileSchedule s;
  s.column_units = static_cast<int32_t>(DivideUp(problem.columns, ColumnsOfUnit(configuration)));
  s.steps = static_cast<int32_t>(DivideUp(problem.depth, depth));
  s.pair = configuration.pair;
  s.grouped = GroupsOf(problem, RowsOfUnit(configuration));
  if (GroupsRows(problem)) {
    s.row_units = static_cast<int32_t>(MostUnits(s.grouped));
    s.units = s.row_units * s.column_units;
  } else {
    s.row_units = static_cast<int32_t>(DivideUp(problem.rows, RowsOfUnit(configuration)));
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

int32_t CtasOf(const TileSchedule& schedule, int32_t multiprocessors) {
  const int32_t each = CtasOfUnit(schedule.pair);
  const int32_t units = schedule.share > 0 ? multiprocessors : schedule.units;
  return std::max(1, std::min(units, multiprocessors / each)) * each;
}

double LoadedBytes(const Problem& problem, const Configuration& c, int32_t depth) {
  const double rows = c.tile.rows * SizeOf(problem.lhs.dtype);
  const double columns = c.tile.columns * SizeOf(problem.rhs.dtype);
  return depth * (rows / (c.pair == Pair::kSharesLhs ? 2 : 1) +
                  columns / (c.pair == Pair::kSharesRhs ? 2 : 1));
}

Times TimesOf(const Problem& problem, const Configuration& c, int32_t depth, const Rates& rates) {
  const double products = double{1} * depth * c.tile.rows * c.tile.columns;
  const double waits = c.pair == Pair::kNone ? 0 : kPairCycles;
  return {std::max(products / rates.products, LoadedBytes(problem, c, depth) / rates.bytes),
          kCyclesPerTile + waits};
}

double CyclesOf(const TileSchedule& s, const Times& t, int32_t multiprocessors) {
  const int32_t at_once = std::max(1, multiprocessors / CtasOfUnit(s.pair));
  return static_cast<double>(DivideUp(s.units, at_once)) * (s.steps * t.step + t.tile);
}

}  // namespace jaxfp8::cuda::sm90
