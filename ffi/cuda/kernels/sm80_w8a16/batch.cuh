// The output tile of a CTA of `sm80_w8a16`.
//
//   batch of one axis                blockIdx.x counts all output tiles; blockIdx.z is 0
//   two axes, weights with jumps     blockIdx.z is the outer index, and blockIdx.x counts its tiles
//   groups (common/groups.h)         blockIdx.x counts the tiles of one entry after the other
//
// Two axes need no division. CTAs of the first outer index read no argument, and weights without
// jumps have no other CTAs.

#pragma once

#include "cuda/kernels/sm80_w8a16/arguments.h"

namespace jaxfp8::cuda::w8a16 {

// Columns of a tile, and its rows from `row` on and before `end`: there may be none, or more than a
// tile has.
struct BlockTile {
  int32_t batch, column_tile, row, end;
  bool sums = true;  // else the rows are of no group
};

// The CTA's output tile without groups.
//   number     of the tile within its outer index
//   tile_rows  rows of a tile
__device__ __forceinline__ BlockTile TileOfBlock(const Arguments& a, int32_t number,
                                                 int32_t tile_rows) {
  OutputTile coord = a.schedule.CoordOf(number);
  if (blockIdx.z != 0) coord.batch += static_cast<int32_t>(blockIdx.z) * a.inner_batch;
  return {coord.batch, coord.column_tile, coord.row_tile * tile_rows, a.rows};
}

// The sum of the lanes up to each, at most `most`, which has 30 bits.
__device__ __forceinline__ int32_t SumUpToLane(int32_t value, int32_t most) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(~0u, value, distance);
    if (static_cast<int32_t>(threadIdx.x % 32) >= distance) value = min(value + other, most);
  }
  return value;
}

// A place among the entries of groups: its first unit, and how many rows the entries before have.
struct EntryCursor {
  int32_t entry = 0, first_unit = 0, above = 0;
};

// Moves a cursor to the entry that has a unit, or over 32 entries that do not. The lanes of a warp
// look at an entry each: most experts may be empty.
//   across  units that a row unit consists of
__device__ __forceinline__ void SkipEntries(const Groups& g, const int32_t* sizes, int32_t across,
                                            int32_t unit, EntryCursor& cursor) {
  constexpr int32_t kMax = 0x3fffffff;  // units and rows have fewer
  const int32_t entry = cursor.entry + static_cast<int32_t>(threadIdx.x % 32);
  const bool is_group = entry < g.groups, exists = entry < EntriesOf(g);
  const int32_t rows = is_group ? Clamp(sizes[entry], g.rows) : 0;
  const int32_t rows_after = SumUpToLane(rows, g.rows - cursor.above);
  const int32_t before = __shfl_up_sync(~0u, rows_after, 1);
  const int32_t above = cursor.above + (threadIdx.x % 32 == 0 ? 0 : before);
  const int32_t units = exists ? RowsOfEntry(g, sizes, entry, above).Units(g) * across : 0;
  const int32_t units_after = SumUpToLane(units, kMax);
  const uint32_t later = __ballot_sync(~0u, exists && unit < cursor.first_unit + units_after);
  if (later != 0) {
    const int owner = __ffs(static_cast<int>(later)) - 1;
    cursor.entry += owner;
    cursor.first_unit += __shfl_sync(~0u, units_after - units, owner);
    cursor.above = __shfl_sync(~0u, above, owner);
  } else {
    cursor.entry += 32;
    cursor.first_unit += __shfl_sync(~0u, units_after, 31);
    cursor.above += __shfl_sync(~0u, rows_after, 31);
  }
}

// The CTA's output tile with groups; one without rows if there is none. By a warp.
inline __device__ __noinline__ BlockTile GroupedTileOfBlock(const Arguments& a, int32_t number) {
  const Groups& g = a.groups;
  EntryCursor cursor;
#pragma unroll 1
  while (cursor.entry < EntriesOf(g)) {
    const EntryRows rows = RowsOfEntry(g, a.group_sizes, cursor.entry, cursor.above);
    const int32_t units = rows.Units(g), in_entry = number - cursor.first_unit;
    if (in_entry < units * a.schedule.column_tiles) {
      const int32_t column = in_entry / units, row = in_entry - column * units;
      const bool sums = cursor.entry < g.groups;
      return {sums ? cursor.entry : 0, column, rows.first + row * g.unit_rows,
              rows.first + rows.count, sums};
    }
    SkipEntries(g, a.group_sizes, a.schedule.column_tiles, number, cursor);
  }
  return {0, 0, 0, 0, false};
}

// The number of the CTA's output tile among all.
__device__ __forceinline__ int64_t OutputTileOfBlock() {
  return int64_t{blockIdx.z} * gridDim.x + blockIdx.x;
}

// The elements skipped by the jumps of the weights, and of their scales (problem.h).
__device__ __forceinline__ int64_t PastWeights(const Arguments& a) {
  return blockIdx.z == 0 ? 0 : blockIdx.z * a.weight_jump;
}
__device__ __forceinline__ int64_t PastScales(const Arguments& a) {
  return blockIdx.z == 0 ? 0 : blockIdx.z * a.scale_jump;
}

}  // namespace jaxfp8::cuda::w8a16
