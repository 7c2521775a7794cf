// Groups of which `sm90_gemm` learns the sizes on the device. Pure.
//
// Rows of lhs (common/groups.h):
//
//     group 0  group 1     group 2  rest     group 0  rest      group 1      rest
//   | 0 0    | 1 1 1 1 1 | 2      | r r  | | 0      | r r r r | 1 1 1 1 1  | r r r |   rows
//   | unit 0 | 1     | 2 | 3      | 4    | | unit 0 | 3   | 4 | 1     | 2  | 5     |   row units
//
// Each entry, a group or a rest, consists of row units of its own, of which the last may have fewer
// rows. Units of a group multiply and come first; those of a rest have sums of 0. CTAs take units
// in turn, and so share the work about equally. A CTA meets its units in ascending order, and finds
// their entries in one pass over the sizes.
//
// The contracted axis, lhs [M, K] and rhs [N, K], out [G, M, N]:
//
//     group 0    group 1      rest       Units are those of a batch of G products. The steps of
//   | 0 0 0 0 0 | 1 1 1 1 1 1 | r r |    one are those that have a value of its group. Steps begin
//   | step 0 | step 1 | step 2 | .. |    at multiples of 128, as scales do. So the first and last
//                                        step of a group may have values of other groups, which
//                                        are masked (sm90_gemm/load.cuh).

#pragma once

#include <cstdint>
#include <limits>

#include "common/platform.h"
#include "cuda/kernels/sm90/schedule.h"

namespace jaxfp8::cuda::sm90 {

// Positions [first, end) of the contracted axis.
struct DepthRange {
  int32_t first = 0, end = std::numeric_limits<int32_t>::max();

  // Whether a step has positions outside. Those after K count, though they are zeros already.
  JAXFP8_HD bool Cuts(int32_t step) const {
    return step * kStepDepth < first || end - step * kStepDepth < kStepDepth;
  }
};

// The batch index of rows of no group.
inline constexpr int32_t kNoGroup = -1;

// A part of the output that a CTA computes: rows from `row` on and before `end`, of which there
// may be none, or more than a tile has.
struct TileBounds {
  int32_t batch = 0, row = 0, end = 0, column = 0;
  bool sums = true;  // else it is zeros
  DepthRange depth;
};

// Finds the tiles of units that ascend.
struct GroupCursor {
  // The entry, or the group of the contracted axis; its first unit; and how many rows, or values of
  // that axis, the ones before it have.
  int32_t entry = 0, first_unit = 0, above = 0;

  // The tile of a CTA in a unit; false where there is no such unit, nor any after it.
  JAXFP8_HD bool Find(const TileSchedule& s, const int32_t* sizes, TileShape tile, int32_t unit,
                      int32_t rank, TileBounds& bounds) {
    const Groups& g = s.grouped;
    JAXFP8_ROLLED
    for (; entry < EntriesOf(g); ++entry) {
      const EntryRows rows = RowsOfEntry(g, sizes, entry, above);
      const int32_t row_units = rows.Units(g);
      const int32_t in_entry = unit - first_unit, units = row_units * s.column_units;
      if (in_entry < units) {
        Place(s, tile, rows, row_units, in_entry, rank, bounds);
        return true;
      }
      first_unit += units, above += rows.count;
    }
    return false;
  }

  // What a group has of the contracted axis. Groups ascend.
  JAXFP8_HD DepthRange DepthOf(const Groups& g, const int32_t* sizes, int32_t group) {
    JAXFP8_ROLLED
    for (; entry < group; ++entry) above += Clamp(sizes[entry], g.depth - above);
    return {above, above + Clamp(sizes[group], g.depth - above)};
  }

 private:
  // As `TileOf` does: columns slowest in groups of rows.
  JAXFP8_HD void Place(const TileSchedule& s, TileShape tile, const EntryRows& rows,
                       int32_t row_units, int32_t in_entry, int32_t rank,
                       TileBounds& bounds) const {
    const int32_t first = s.units_per_band.Quotient(in_entry) * s.band_rows;
    const int32_t in_rows = in_entry - first * s.column_units;
    const int32_t left = row_units - first, across = left < s.band_rows ? left : s.band_rows;
    const int32_t column = in_rows / across, row = first + in_rows - column * across;
    const int32_t second_rows = s.pair == Pair::kSharesRhs ? rank * tile.rows : 0;
    bounds.sums = entry < s.grouped.groups;
    bounds.batch = bounds.sums ? entry : kNoGroup;
    bounds.row = rows.first + row * s.grouped.unit_rows + second_rows;
    bounds.end = rows.first + rows.count;
    bounds.column = (s.pair == Pair::kSharesLhs ? 2 * column + rank : column) * tile.columns;
  }
};

}  // namespace jaxfp8::cuda::sm90
