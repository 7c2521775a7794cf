// Where the tiles of a block lie, with groups of rows and without.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_GROUPS_CUH_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_GROUPS_CUH_

#include "cuda/kernels/sm90_gemm/arguments.h"
#include "cuda/kernels/sm90_gemm/groups.h"

namespace jaxfp8::cuda::sm90 {

// The tile of this block in a unit; false after the last one.
template <typename L>
__device__ __forceinline__ bool BoundsOf(const Arguments& a, int32_t unit, int32_t rank,
                                         GroupCursor& cursor, TileBounds& bounds) {
  const Schedule& s = a.schedule;
  constexpr TileShape kTile{L::kTileRows, L::kTileColumns};
  if (!L::kMixed && s.grouped.grouping != Grouping::kNone) {
    return cursor.Find(s, a.group_sizes, kTile, unit, rank, bounds);
  }
  const TileCoord tile = TileOf(s, unit, rank);
  bounds = {tile.batch, tile.row * kTile.rows, static_cast<int32_t>(a.epilogue.rows),
            tile.column * kTile.columns, true};
  return true;
}

// What a math warp knows of its tile lies in 32 bytes of its shared memory while it multiplies: the
// sums leave no registers.
__device__ __forceinline__ void StoreShared4(uint32_t to, int32_t a, int32_t b, int32_t c,
                                             int32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ int4 LoadInts(uint32_t from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void KeepTile(uint32_t to, const TileBounds& b, const GroupCursor& c) {
  StoreShared4(to, b.batch, b.row, b.end, b.column);
  StoreShared4(to + 16, c.entry, c.first_unit, c.above, 0);
  __syncwarp();
}
__device__ __forceinline__ void RecallTile(uint32_t from, TileBounds& b, GroupCursor& c) {
  const int4 bounds = LoadInts(from), cursor = LoadInts(from + 16);
  b.batch = bounds.x, b.row = bounds.y, b.end = bounds.z, b.column = bounds.w;
  c = {cursor.x, cursor.y, cursor.z};
  __syncwarp();  // what follows writes there
}

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_GROUPS_CUH_
