// The epilogue of accumulators that a warp has staged in shared memory: 16 rows x 32 float32.
//
//   accumulators in registers        staged                     output
//   lane: 2 columns of rows   --->   [16][128 bytes]   --->     lane: 16 bytes of a row, eight
//   r, r + 8 in every eight          padded                     lanes its 128 bytes

#pragma once

#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/epilogue/row_batch.cuh"
#include "cuda/kernels/sm90/block.h"
#include "cuda/kernels/sm90/groups.h"
#include "cuda/kernels/sm90/shared.cuh"

namespace jaxfp8::cuda::sm90 {

// Where a warp's 16 rows of a wave lie in the output. Those from `end` on are not stored.
struct WarpTile {
  int32_t batch, row, column, end = 0;

  // Rows of no group have no bias.
  __device__ __forceinline__ bool HasBias() const { return batch != kNoGroup; }
};

// Stores four matrices of 8 x 8 16-bit values; lane l has the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatrices(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stages 32 columns of 32-bit sums, from register kFirst on, each pair of columns in reverse. So
// the compiler keeps the sum of an even column in an odd register, and the accumulator, which wgmma
// wants in an even one, comes from the other register bank: else FFMA takes two cycles.
template <int kFirst, typename T, int kCount>
__device__ __forceinline__ void StageSums(const T (&total)[kCount], uint32_t staged) {
  const int32_t lane = threadIdx.x % 32;
  const uint32_t to = staged + lane / 4 * kWidePitch + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    uint32_t words[2];
    memcpy(words, &total[kFirst + i], sizeof(words));
    StoreShared2(to + i % 4 / 2 * 8 * kWidePitch + i / 4 * 32, words[1], words[0]);
  }
}

// Four columns from `StageSums`.
__device__ __forceinline__ uint4 LoadSums(uint32_t from) {
  const uint4 v = LoadShared4(from);
  return make_uint4(v.y, v.x, v.w, v.z);
}

// Columns that go through the whole epilogue at a time.
inline constexpr int kStagedColumns = kStagedBytes / 4;
// Eight lanes have a row, so that a warp has four at a time.
inline constexpr int kLaneRows = 4;
static_assert(kLaneRows * kRowsInFlight == kWarpRows);

// Raises the amax of a row to the largest |y| of its eight lanes.
__device__ __forceinline__ void UpdateRowAmax(const Elementwise& ew, const Quad& q, bool inside,
                                              uint32_t seen) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) seen = max(seen, __shfl_xor_sync(~0u, seen, lanes));
  if (threadIdx.x % 8 == 0 && inside) {
    atomicMax(ew.amax + ew.amax_plane.At(q.b, q.r, 0), seen);
  }
}

// The epilogue of 16 rows x 32 columns of scaled sums in shared memory. Returns the largest |y| of
// the lane.
template <int kPitch = kWidePitch>
__device__ __forceinline__ uint32_t StoreStaged(const Epilogue& e, const WarpTile& tile,
                                                int32_t part, uint32_t staged) {
  const Elementwise& ew = e.elementwise;
  const int32_t lane = threadIdx.x % 32;
  const int32_t column = tile.column + part * kStagedColumns + lane % 8 * 4;
  const int32_t left = static_cast<int32_t>(e.columns) - column;
  Quad q{max(tile.batch, 0), 0, column, max(min(left, 4), 0)};
  uint32_t largest = 0;
#pragma unroll 1
  for (int32_t r = lane / 8; r < kWarpRows; r += 4) {
    q.r = tile.row + r;
    const bool inside = q.r < tile.end;
    uint32_t seen = 0;
    if (inside && q.count > 0) {
      const uint4 v = LoadSums(staged + r * kPitch + lane % 8 * 16);
      float y[4];
      memcpy(y, &v, sizeof(y));
      seen = ApplyWithPlanes(ew, q, tile.HasBias(), y);
    }
    largest = max(largest, seen);
    if (ew.amax_kind == AmaxKind::kPerRow) UpdateRowAmax(ew, q, inside, seen);
  }
  return largest;
}

// The same, where columns come in aligned fours. The loads of a lane's four rows are in flight
// together.
template <int kPitch = kWidePitch>
__device__ __forceinline__ uint32_t StoreStagedRows(const Epilogue& e, const WarpTile& tile,
                                                    int32_t part, uint32_t staged) {
  const Elementwise& rest = e.elementwise;
  const int32_t lane = threadIdx.x % 32;
  const int32_t rows = min(kWarpRows, tile.end - tile.row);
  if (rows <= 0) return 0;
  const int32_t column = tile.column + part * kStagedColumns + lane % 8 * 4;
  const bool inside = column < e.columns;
  const RowCursor cursor{tile.batch, tile.row, inside ? column : 0, lane / 8, kLaneRows, rows - 1};
  float bias[4] = {};
  if (rest.bias_plane && tile.HasBias()) {
    LoadPlane(rest.bias_plane, rest.bias, Quad{cursor.b, 0, cursor.c, 4}, 0.0f, bias);
  }
  RowBatch y;
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    const uint4 v = LoadSums(staged + (lane / 8 + kLaneRows * j) * kPitch + lane % 8 * 16);
    memcpy(y[j], &v, sizeof(v));
  }
  const int32_t valid = inside ? (rows - lane / 8 + kLaneRows - 1) / kLaneRows : 0;
  return ApplyToBatch<8>(rest, cursor, valid, bias, y);
}

}  // namespace jaxfp8::cuda::sm90
