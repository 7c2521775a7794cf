// Which CTA computes which tiles in the Hopper kernels. Pure.
//
//   rows of the output
//     |   +------+------+------+--     CTAs, or pairs of them, take tiles in turn. A band of
//     v   |  0   |  8   |  16  |       kBandRows rows of lhs is finished first, columns slowest,
//         |  1   |  9   |  17  |       so that the tiles of one turn form a rectangle: then both
//         | ...  | ...  | ...  |       operands are read from L2.
//         +======+======+======+==
//
// Beside 16-bit values (sm90_w8a16/schedule.h) the units that do not fill a turn, and those of the
// turn before, are shared: each CTA has the same number of their steps. A tile that several
// CTAs have parts of is finished by the one with its first step; the others, which have smaller
// numbers, leave their sums in the workspace.
//
//   units      | 0          | 1          | 2          |     three units of four CTAs: each has
//   steps      | 0 1 2 3    | 0 1 2 3    | 0 1 2 3    |     three steps
//   CTA          3 3 3   2    2 2   1 1    1   0 0 0
//
// A pair is a cluster of two CTAs with neighbouring tiles. The operand that both need is loaded
// once: half by each CTA, for both.

#pragma once

#include <cstdint>

#include "common/platform.h"
#include "cuda/kernels/common/divisor.h"
#include "cuda/kernels/common/groups.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::sm90 {

// K of a stage, in elements and bytes; also that of a block of scales.
inline constexpr int kStepDepth = 128;

// Rows and columns of an output tile.
struct TileShape {
  int32_t rows = 0, columns = 0;
  JAXFP8_HD constexpr bool operator==(const TileShape& o) const {
    return rows == o.rows && columns == o.columns;
  }
};

// The neighbouring tiles of a pair of CTAs share columns of the output, and so rhs, or rows, and
// so lhs.
enum class Pair : uint8_t { kNone, kSharesRhs, kSharesLhs };

struct Configuration {
  TileShape tile;
  Pair pair = Pair::kNone;
};

// The tiles of a launch. A unit is a tile, or the two tiles of a pair. With groups of rows `units`
// and `row_units` are bounds: how many there are is known on the device alone.
struct TileSchedule {
  int32_t units = 0, row_units = 0, column_units = 0;  // `units` of all batch indices
  int32_t band_rows = 1;                               // row units of a band
  int32_t steps = 0;                                   // along K
  Pair pair = Pair::kNone;
  Divisor units_per_batch, units_per_band;
  Divisor rows_of_band, rows_of_last_band;
  // Units from `whole_units` on are shared; a CTA has `share` of their steps.
  int32_t whole_units = 0, share = 0;
  Divisor steps_of_unit;
  Groups grouped;  // of rows of lhs, or of the contracted axis (groups.h)
};

// What a CTA computes at a time: steps [first, end) of a unit.
struct Part {
  int32_t unit, first, end;
};

// The parts of a CTA, one after the other.
//   kShares  whether units may be shared
template <bool kShares>
struct Parts {
  int32_t unit, stride;     // the next unit that is not shared, and from one to the next
  int32_t at = 0, end = 0;  // of the steps of shared units

  //   cta, ctas  its number, or that of its pair, and their number
  JAXFP8_HD Parts(const TileSchedule& s, int32_t cta, int32_t ctas) : unit(cta), stride(ctas) {
    if constexpr (!kShares) return;
    const int32_t all = s.share > 0 ? (s.units - s.whole_units) * s.steps : 0;
    const int32_t first = (ctas - 1 - cta) * s.share;
    at = first < all ? first : all;
    end = all - at < s.share ? all : at + s.share;
  }
  JAXFP8_HD bool Next(const TileSchedule& s, Part& part) {
    if (unit < s.whole_units) {
      part = {unit, 0, s.steps};
      unit += stride;
      return true;
    }
    if (!kShares || at >= end) return false;
    const int32_t shared = s.steps_of_unit.Quotient(at);
    part.unit = s.whole_units + shared, part.first = at - shared * s.steps;
    part.end = s.steps - part.first < end - at ? s.steps : part.first + end - at;
    at += part.end - part.first;
    return true;
  }
};

// A tile, by tiles along each axis.
struct TileCoord {
  int32_t batch, row, column;
};

// The tile of a CTA in a unit. `rank` is that of the CTA in its pair.
JAXFP8_HD TileCoord TileOf(const TileSchedule& s, int32_t unit, int32_t rank) {
  const int32_t batch = s.units_per_batch.Quotient(unit);
  const int32_t in_batch = unit - batch * s.row_units * s.column_units;
  const int32_t band = s.units_per_band.Quotient(in_batch);
  const int32_t first = band * s.band_rows;
  const int32_t in_band = in_batch - first * s.column_units;
  const bool is_last = first + s.band_rows > s.row_units;
  const int32_t rows = is_last ? s.row_units - first : s.band_rows;
  const int32_t column = (is_last ? s.rows_of_last_band : s.rows_of_band).Quotient(in_band);
  const int32_t row = first + in_band - column * rows;
  return {batch, s.pair == Pair::kSharesRhs ? 2 * row + rank : row,
          s.pair == Pair::kSharesLhs ? 2 * column + rank : column};
}

// A step has `depth` of K.
TileSchedule MakeSchedule(const Problem& problem, const Configuration& configuration,
                          int32_t depth = kStepDepth);

// How many CTAs a launch has: a multiple of the CTAs of a unit, at most one a multiprocessor.
int32_t CtasOf(const TileSchedule& schedule, int32_t multiprocessors);

// Of a multiprocessor in a clock cycle: products of the tensor cores, and bytes that are loaded
// from L2 while all multiprocessors load.
struct Rates {
  double products = 4096, bytes = 44;
};

// The estimated clock cycles of a step, and of a tile beside its steps.
struct Times {
  double step, tile;
};
Times TimesOf(const Problem& problem, const Configuration& configuration, int32_t depth,
              const Rates& rates);

// Those of a product, whose CTAs take units in turn.
double CyclesOf(const TileSchedule& schedule, const Times& times, int32_t multiprocessors);

// Bytes that a CTA loads from L2 for a step.
double LoadedBytes(const Problem& problem, const Configuration& configuration, int32_t depth);

}  // namespace jaxfp8::cuda::sm90
