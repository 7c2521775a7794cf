#include "cuda/kernels/sm90_gemm/schedule.h"

#include <span>
#include <utility>

#include "cuda/kernels/sm90_gemm/path.h"

namespace jaxfp8::cuda::sm90 {
namespace {

// With one set of sums (timed with int8) 128 x 256 without pairs is as fast as with them, or up to
// 8 % faster. It loads 48 bytes a cycle.
constexpr double kSumBytesPerCycle = 48;

Rates RatesOf(const Problem& problem) {
  Rates rates;
  if (SumsFirst(problem)) rates.bytes = kSumBytesPerCycle;
  return rates;
}

std::span<const TileShape> TileShapesOf(const Problem& problem) {
  if (SumsFirst(problem)) return kSumTileShapes;
  return kTileShapes;
}

double CyclesOf(const Problem& problem, const Configuration& configuration,
                int32_t multiprocessors) {
  const Times times = TimesOf(problem, configuration, kStepDepth, RatesOf(problem));
  return CyclesOf(MakeSchedule(problem, configuration), times, multiprocessors);
}

}  // namespace

Configuration Choose(const Problem& given, int32_t multiprocessors) {
  const Problem problem = WithEvenGroups(given);
  Configuration best;
  std::pair<double, double> least;
  for (const TileShape tile : TileShapesOf(problem)) {
    // With a tile for each multiprocessor, pairs were slower: 31.2 us, not 29.2, with 512 x 4096
    // outputs and K = 7168 on an H100.
    const bool pairs = MakeSchedule(problem, {tile, Pair::kNone}).units > multiprocessors;
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      if (pair != Pair::kNone && !pairs) continue;
      const Configuration configuration{tile, pair};
      // Of two that take as long, the one that loads less: tiles of 128 x 192 were 3 % faster in
      // pairs that share rhs than in pairs that share lhs.
      const std::pair cost(CyclesOf(problem, configuration, multiprocessors),
                           LoadedBytes(problem, configuration, kStepDepth));
      if (best.tile.rows != 0 && cost >= least) continue;
      best = configuration, least = cost;
    }
  }
  return best;
}

}  // namespace jaxfp8::cuda::sm90
