// The producer warpgroup of a CTA: it fills stages that have become empty.
//
//   global                                             shared memory
//   weights [N, K] or [K, N]  --- warp 0, one    ->    stage, 64 of K: [rows][64 bytes], or
//                                 thread (TMA)               a box [64 of K][64 rows] for each wave
//   values [M, K], 16 bits    ---                ->        [columns][128 bytes]; all swizzled
//   scales of whole lines     --- warps 2, 3     ->    chunk of a tile: [rows], then [columns]
//
// Stages and chunks are rings of their own. Both run ahead across the end of a tile.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/sm90/barrier.cuh"
#include "cuda/kernels/sm90/groups.cuh"
#include "cuda/kernels/sm90/shared.cuh"

namespace jaxfp8::cuda::sm90 {

// Copies weights [K, N]: a box of 64 lines of 64 bytes for each wave. Of a pair that shares them
// each CTA copies half for both.
template <typename L>
__device__ __forceinline__ void CopyLinesOfN(Pair pair, uint32_t to, const CUtensorMap* lhs,
                                             uint32_t full, int32_t k, int32_t row, int32_t batch,
                                             int32_t rank) {
  constexpr int kWgmmas = L::kTileRows / kWgmmaRows, kWgmmaBytes = kWgmmaRows * L::kLhsLine;
  const bool shares = pair == Pair::kSharesLhs;
#pragma unroll
  for (int i = 0; i < kWgmmas; ++i) {
    if (!shares) {
      CopyTile(to + i * kWgmmaBytes, lhs, full, row + i * kWgmmaRows, k, batch);
    } else if (2 * i / kWgmmas == rank) {
      CopyTileTo(3, to + i * kWgmmaBytes, lhs, full, row + i * kWgmmaRows, k, batch);
    }
  }
}

template <typename L>
__device__ void LoadTiles(const Arguments& a, const CUtensorMap* lhs, const CUtensorMap* rhs,
                          uint32_t shared, Parts<true> parts, int32_t rank) {
  const Pair pair = a.schedule.pair;
  Ring<L::kStages> ring;
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
    const int32_t lhs_batch = a.lhs_batched ? tile.batch : 0;
    const int32_t rhs_batch = a.rhs_batched ? tile.batch : 0;
    const int32_t row = tile.column, column = tile.row;  // of the transposed output
    for (int32_t step = part.first; step < part.end; ++step, ring.Next()) {
      const uint32_t full = shared + L::kFullAt + 8 * ring.stage;
      WaitAsleep(shared + L::kEmptyAt + 8 * ring.stage, ring.parity ^ 1);
      ArriveExpecting(full, L::kLhsBytes + L::kRhsBytes);
      const uint32_t to_lhs = shared + L::kLhsAt + ring.stage * L::kLhsBytes;
      const uint32_t to_rhs = shared + L::kRhsAt + ring.stage * L::kRhsBytes;
      const int32_t lhs_k = step * L::kLhsLine, rhs_k = step * L::kRhsLine;
      if (a.weights.mn_major) {
        CopyLinesOfN<L>(pair, to_lhs, lhs, full, lhs_k, row, lhs_batch, rank);
      } else {
        CopyOperand<L::kLhsBytes, L::kTileRows>(pair == Pair::kSharesLhs, to_lhs, lhs, full, lhs_k,
                                                row, lhs_batch, rank);
      }
      CopyOperand<L::kRhsBytes, L::kTileColumns>(pair == Pair::kSharesRhs, to_rhs, rhs, full, rhs_k,
                                                 column, rhs_batch, rank);
    }
  }
  if (pair != Pair::kNone) DrainRing(ring, shared + L::kEmptyAt);
}

// Stores the scale of a line. A line beyond the last counts as the last.
__device__ __forceinline__ void StoreScale(const StepScales& s, uint32_t to, int32_t batch,
                                           int32_t line) {
  const int64_t at =
      batch * s.batch_stride + s.tile_lines.Quotient(min(line, s.last_line)) * s.line_stride;
  StoreShared(to, s.scale ? ScaleOf(s.form, LoadScale(s.scale, s.form, at)) : 1.0f);
}

// The scales of each tile: of its rows, then of its columns.
template <typename L>
__device__ void LoadLineScales(const Arguments& a, uint32_t shared, Parts<true> parts, int32_t rank,
                               int32_t thread) {
  constexpr int kRows = L::kTileRows, kColumns = L::kTileColumns;
  Ring<L::kChunks> ring;
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
    if (part.first > 0) continue;  // another CTA finishes the tile
    const uint32_t to = shared + L::kScalesAt + ring.stage * L::kChunkBytes;
    WaitAsleep(shared + L::kChunkEmptyAt + 8 * ring.stage, ring.parity ^ 1);
#pragma unroll 1
    for (int32_t i = thread; i < kRows; i += kScaleThreads) {
      StoreScale(a.lhs_scales, to + 4 * i, tile.batch, tile.column + i);
    }
#pragma unroll 1
    for (int32_t i = thread; i < kColumns; i += kScaleThreads) {
      StoreScale(a.rhs_scales, to + 4 * (kRows + i), tile.batch, tile.row + i);
    }
    Arrive(shared + L::kChunkFullAt + 8 * ring.stage);
    ring.Next();
  }
}

}  // namespace jaxfp8::cuda::sm90
