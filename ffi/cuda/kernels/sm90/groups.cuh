// Where the tiles of a CTA lie, with groups and without.

#pragma once

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90/groups.h"
#include "cuda/kernels/sm90/shared.cuh"

namespace jaxfp8::cuda::sm90 {

__device__ __forceinline__ bool HasGroups(const Arguments& a) {
  return a.schedule.grouped.grouping != Grouping::kNone;
}

__device__ __forceinline__ bool IsContracted(const Arguments& a) {
  return a.schedule.grouped.grouping == Grouping::kContracted;
}

// The tile of this CTA in a unit, without groups.
template <typename L>
__device__ __forceinline__ TileBounds BoundsOf(const Arguments& a, int32_t unit, int32_t rank) {
  const TileCoord tile = TileOf(a.schedule, unit, rank);
  const int32_t row = L::kTransposed ? tile.column : tile.row;
  const int32_t column = L::kTransposed ? tile.row : tile.column;
  return {tile.batch, row * L::kOutputTile.rows, static_cast<int32_t>(a.epilogue.rows),
          column * L::kOutputTile.columns, true};
}

// The same with groups; false after the last unit. Of the contracted axis the part gets the steps
// of its group.
template <typename L>
__device__ __forceinline__ bool FindTile(const Arguments& a, Part& part, int32_t rank,
                                         GroupCursor& cursor, TileBounds& bounds) {
  const Groups& groups = a.schedule.grouped;
  if (!IsContracted(a)) {
    return cursor.Find(a.schedule, a.group_sizes, L::kOutputTile, part.unit, rank, bounds);
  }
  bounds = BoundsOf<L>(a, part.unit, rank);
  bounds.depth = cursor.DepthOf(groups, a.group_sizes, bounds.batch);
  bounds.sums = bounds.depth.first < bounds.depth.end;
  part.first = bounds.depth.first / kStepDepth;
  part.end = (bounds.depth.end + kStepDepth - 1) / kStepDepth;
  return true;
}

// The next tile that a loading thread has something to load for; false after the last one.
template <typename L, bool kShares>
__device__ __forceinline__ bool NextTile(const Arguments& a, Parts<kShares>& parts, int32_t rank,
                                         GroupCursor& cursor, Part& part, TileBounds& bounds) {
  while (parts.Next(a.schedule, part)) {
    if (!HasGroups(a)) {
      bounds = BoundsOf<L>(a, part.unit, rank);
      return true;
    }
    if (!FindTile<L>(a, part, rank, cursor, bounds)) return false;
    if (bounds.sums) return true;
  }
  return false;
}

// The tile of a consumer warp, with groups or without; false after the last one.
template <typename L>
__device__ __forceinline__ bool TileOfPart(const Arguments& a, Part& part, int32_t rank,
                                           GroupCursor& cursor, TileBounds& bounds) {
  if (HasGroups(a)) return FindTile<L>(a, part, rank, cursor, bounds);
  bounds = BoundsOf<L>(a, part.unit, rank);
  return true;
}

// What a consumer warp knows of its tile lies in kKeptBytes of shared memory while it multiplies:
// the sums leave no registers.
__device__ __forceinline__ void KeepTile(uint32_t to, const TileBounds& b, const GroupCursor& c) {
  StoreShared4(to, b.batch, b.row, b.end, b.column);
  StoreShared4(to + 16, c.entry, c.first_unit, c.above, 0);
  __syncwarp();
}
__device__ __forceinline__ void RecallTile(uint32_t from, TileBounds& b, GroupCursor& c) {
  const int4 bounds = LoadInts(from), cursor = LoadInts(from + 16);
  b.batch = bounds.x, b.row = bounds.y, b.end = bounds.z, b.column = bounds.w;
  c = {cursor.x, cursor.y, cursor.z};
}

}  // namespace jaxfp8::cuda::sm90
