#include "cuda/kernels/sm90_w8a16/schedule.h"

#include <algorithm>
#include <utility>

#include "common/sizes.h"
#include "cuda/kernels/sm90/operands.h"

namespace jaxfp8::cuda::sm90 {
namespace {

// With 16-bit values a column takes twice as long as in `sm90_gemm`; and tiles of less than 256
// columns longer still, since each fragment is decoded for fewer products. On an H100 a tile of
// 128 x 256 takes 43 us with K = 4096, one of 256 x 128 53 us, one of 128 x 128 34 us.
constexpr double kProductsPerCycle = 2048, kNarrow = 1.3, kSmall = 1.6;
constexpr int32_t kWideColumns = 256;
// The factor for groups of 16-bit values, whose tiles of 256 overlap: CTAs load the same lines at
// the same time. On an H200 64 groups of 192 on average take 374 us by tiles of 256 x 128 and 413
// by those of 128 x 256, with K = 4096; 8 groups of 1024 take 791 and 672, with K = 7168.
constexpr double kGroupedWide = 1.15;
// What shared units take beside their steps: counters are cleared before, and the sums of a tile go
// through memory. On an H100 14 us for tiles of 128 x 256, 9 us for half of that.
constexpr double kShareCycles = 12000, kShareCyclesPerOutput = 0.5;
// Steps that are counted in 32 bits.
constexpr int64_t kMaxSharedSteps = int64_t{1} << 30;

Times MixedTimes(const Problem& problem, const Configuration& c) {
  Rates rates;
  rates.products = kProductsPerCycle;
  if (c.tile.columns < kWideColumns) rates.products /= c.tile.rows > 128 ? kNarrow : kSmall;
  return TimesOf(problem, c, kMixedDepth, rates);
}

// The units that are shared: those of the last turn, which is not full, and of the one before.
int32_t SharedUnits(const TileSchedule& s, int32_t ctas) {
  const int32_t left = s.units % ctas;
  return left == 0 ? 0 : std::min(s.units, left + ctas);
}

// The estimated time with shared units.
double CyclesShared(const TileSchedule& s, const Times& t, TileShape tile, int32_t ctas) {
  const int32_t shared = SharedUnits(s, ctas);
  const double whole = (s.units - shared) / ctas;
  const double steps = static_cast<double>(DivideUp(int64_t{shared} * s.steps, ctas));
  const double share = kShareCycles + kShareCyclesPerOutput * tile.rows * tile.columns;
  return whole * (s.steps * t.step + t.tile) + steps * t.step + 2 * t.tile + share;
}

// How many units of groups there are is known on the device alone, so they are not shared.
bool MayShare(const Problem& problem, const Configuration& c, const TileSchedule& s, int32_t ctas) {
  const int64_t steps = int64_t{SharedUnits(s, ctas)} * s.steps;
  return problem.grouping == Grouping::kNone && c.pair == Pair::kNone && steps > 0 &&
         steps <= kMaxSharedSteps;
}

// The estimated time of a product.
double CyclesOfMixed(const Problem& problem, const Configuration& configuration,
                     int32_t multiprocessors) {
  const TileSchedule s = MakeMixedSchedule(problem, configuration);
  const Times times = MixedTimes(problem, configuration);
  const double alone = CyclesOf(s, times, multiprocessors);
  if (!MayShare(problem, configuration, s, multiprocessors)) return alone;
  return std::min(alone, CyclesShared(s, times, configuration.tile, multiprocessors));
}

// The estimated time of groups of values, whose sizes are random: each ends in the middle of a
// tile, and the last turn of the CTAs may have few.
double CyclesOfGroups(const Problem& problem, TileShape tile, int32_t multiprocessors) {
  const auto columns = static_cast<double>(problem.columns);
  const double groups = std::max(1.0, std::min(columns, static_cast<double>(problem.batch)));
  const double across = std::max(1.0, columns / groups / tile.columns + 0.5);
  const double units = groups * across * static_cast<double>(DivideUp(problem.rows, tile.rows));
  const Times times = MixedTimes(problem, {tile, Pair::kNone});
  const double step = times.step * (tile.columns >= kWideColumns ? kGroupedWide : 1);
  const auto steps = static_cast<double>(DivideUp(problem.depth, kMixedDepth));
  return (units / multiprocessors + 0.5) * (steps * step + times.tile);
}

}  // namespace

TileSchedule MakeMixedSchedule(const Problem& problem, const Configuration& configuration) {
  if (!GroupsRows(problem) || HasWeightsOnRight(problem)) {
    return MakeSchedule(problem, configuration, kMixedDepth);
  }
  const TileShape tile = configuration.tile;
  return MakeSchedule(Swapped(problem), {{tile.columns, tile.rows}, configuration.pair},
                      kMixedDepth);
}

void ShareUnits(const Problem& problem, const Configuration& configuration, int32_t ctas,
                TileSchedule& s) {
  if (!MayShare(problem, configuration, s, ctas)) return;
  const Times times = MixedTimes(problem, configuration);
  if (CyclesShared(s, times, configuration.tile, ctas) >= CyclesOf(s, times, ctas)) return;
  const int32_t shared = SharedUnits(s, ctas);
  s.whole_units = s.units - shared;
  s.share = static_cast<int32_t>(DivideUp(int64_t{shared} * s.steps, ctas));
}

// Pairs were no faster.
Configuration ChooseMixed(const Problem& given, int32_t multiprocessors) {
  const Problem problem = WithEvenGroups(given);
  Configuration best;
  std::pair<double, double> least;
  for (const TileShape tile : kMixedTileShapes) {
    const Configuration configuration{tile, Pair::kNone};
    const double cycles = GroupsRows(given)
                              ? CyclesOfGroups(given, tile, multiprocessors)
                              : CyclesOfMixed(problem, configuration, multiprocessors);
    const std::pair cost(cycles, LoadedBytes(problem, configuration, kMixedDepth));
    if (best.tile.rows != 0 && cost >= least) continue;
    best = configuration, least = cost;
  }
  return best;
}

size_t SharedUnitsBytes(const TileSchedule& schedule, TileShape tile, int32_t ctas) {
  if (schedule.share == 0) return 0;
  return static_cast<size_t>(ctas) *
         (kCounterBytes + sizeof(float) * static_cast<size_t>(tile.rows) * tile.columns);
}

}  // namespace jaxfp8::cuda::sm90
