// The entries of a product in groups: each group, and the rows of none.
//
//   contiguous, lhs [M, K]                 masked, lhs [G * rows of each, K]
//     group 0  group 1     group 2  rest     group 0  rest      group 1      rest
//   | 0 0    | 1 1 1 1 1 | 2      | r r  | | 0      | r r r r | 1 1 1 1 1  | r r r |
//
// Sizes are known on the device alone. Rows of a rest have sums of 0, and no bias.

#pragma once

#include <cstdint>

#include "common/platform.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

struct Groups {
  Grouping grouping = Grouping::kNone;
  int32_t groups = 0, rows = 0, rows_per_group = 0;  // rows of lhs; where masked, for each group
  int32_t unit_rows = 1;                             // the rows that a CTA takes at a time
  int32_t depth = 0;
};

// Groups, and one rest after all of them, or one for each.
JAXFP8_HD int32_t EntriesOf(const Groups& g) {
  return g.grouping == Grouping::kMasked ? 2 * g.groups : g.groups + 1;
}

// Rows [first, first + count) of an entry.
struct EntryRows {
  int32_t first, count;

  JAXFP8_HD int32_t Units(const Groups& g) const { return (count + g.unit_rows - 1) / g.unit_rows; }
};

JAXFP8_HD int32_t Clamp(int32_t value, int32_t high) {
  return value < 0 ? 0 : value > high ? high : value;
}

// The rows of an entry. Sizes below 0 count as 0, and rows beyond the last are cut off.
//   above  the rows of the entries before, of contiguous groups
JAXFP8_HD EntryRows RowsOfEntry(const Groups& g, const int32_t* sizes, int32_t entry,
                                int32_t above) {
  const bool is_rest = entry >= g.groups;
  if (g.grouping == Grouping::kContiguous) {
    const int32_t left = g.rows - above;
    return {above, is_rest ? left : Clamp(sizes[entry], left)};
  }
  const int32_t group = is_rest ? entry - g.groups : entry;
  const int32_t first = group * g.rows_per_group, count = Clamp(sizes[group], g.rows_per_group);
  return is_rest ? EntryRows{first + count, g.rows_per_group - count} : EntryRows{first, count};
}

// The groups of a problem, for CTAs that take so many rows at a time.
inline Groups GroupsOf(const Problem& problem, int32_t unit_rows) {
  if (problem.grouping == Grouping::kNone || problem.batch == 0) return {};
  const auto rows = static_cast<int32_t>(problem.rows);
  const auto groups = static_cast<int32_t>(problem.batch);
  const auto depth = static_cast<int32_t>(problem.depth);
  return {problem.grouping, groups, rows, rows / groups, unit_rows, depth};
}

// The most units that rows of groups, and those of none, can have: fewer rows are fewer units.
inline int64_t MostUnits(const Groups& g) {
  const int64_t units = int64_t{g.rows} / g.unit_rows + EntriesOf(g);
  return units < g.rows ? units : g.rows;
}

}  // namespace jaxfp8::cuda
