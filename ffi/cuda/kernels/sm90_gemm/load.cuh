// The producer warpgroup of a CTA: it fills what has become empty.
//
//   global                                           shared memory
//   lhs [M, K], lines of K --- warp 0, one thread -> stage: tile rows x 128 bytes, swizzled
//   rhs [N, K], lines of K --- (TMA)              ->        tile columns x 128 bytes, swizzled
//   scales, in any order   --- warps 2, 3         -> chunk of four steps: [rows][4], then
//                              (cp.async)            [columns, or parts of 128 or 64 of them][4]
//     of all of K          --- warps 2, 3         -> chunk of a tile: scales [rows], zero points,
//                                                    sums, bias; the same of [columns]
//
// With two consumer warpgroups a stage is full when its scales are there, too. One that has values
// of other groups lands first, and is full when they are masked.
//
// Stages and chunks are rings of their own. Both run ahead across the end of a tile.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90/barrier.cuh"
#include "cuda/kernels/sm90/groups.cuh"
#include "cuda/kernels/sm90/shared.cuh"
#include "cuda/kernels/sm90_gemm/layout.h"

namespace jaxfp8::cuda::sm90 {

template <typename L>
__device__ void LoadTiles(const Arguments& a, const CUtensorMap* lhs, const CUtensorMap* rhs,
                          uint32_t shared, Parts<false> parts, int32_t rank) {
  const Pair pair = a.schedule.pair;
  Ring<L::kStages> ring;
  Ring<L::kChunks> chunk;
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
    const int32_t lhs_batch = a.lhs_batched ? tile.batch : 0;
    const int32_t rhs_batch = a.rhs_batched ? tile.batch : 0;
    for (int32_t step = part.first; step < part.end; ++step, ring.Next()) {
      const bool lands = tile.depth.Cuts(step);
      const uint32_t full = shared + (lands ? L::kLandedAt : L::kFullAt) + 8 * ring.stage;
      WaitAsleep(shared + L::kEmptyAt + 8 * ring.stage, ring.parity ^ 1);
      const bool needs_chunk = L::kStageHasScales && (step - part.first) % kChunkSteps == 0;
      if (needs_chunk) {
        Expect(full, L::kLhsBytes + L::kRhsBytes);
      } else {
        ArriveExpecting(full, L::kLhsBytes + L::kRhsBytes);
      }
      const uint32_t to_lhs = shared + L::kLhsAt + ring.stage * L::kLhsBytes;
      const uint32_t to_rhs = shared + L::kRhsAt + ring.stage * L::kRhsBytes;
      const int32_t k = step * kStepDepth;
      CopyOperand<L::kLhsBytes, L::kTileRows>(pair == Pair::kSharesLhs, to_lhs, lhs, full, k,
                                              tile.row, lhs_batch, rank);
      CopyOperand<L::kRhsBytes, L::kTileColumns>(pair == Pair::kSharesRhs, to_rhs, rhs, full, k,
                                                 tile.column, rhs_batch, rank);
      if (needs_chunk) {
        WaitAsleep(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
        chunk.Next();
        Arrive(full);
      }
    }
  }
  if (pair != Pair::kNone) DrainRing(ring, shared + L::kEmptyAt);
}

// The scales of the lines of a side that a thread copies: every 64th of a tile.
template <int kCount>
struct ThreadLines {
  static constexpr int kPitch = kLineBytes * kScaleThreads;  // of what it copies to
  const float* scales[kCount];                               // of each line, at step 0

  // A line beyond the last counts as the last.
  //   first     the thread's first line
  //   distance  to its next
  __device__ __forceinline__ void Find(const StepScales& s, int32_t batch, int32_t first,
                                       int32_t distance) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t tile = s.tile_lines.Quotient(min(first + i * distance, s.last_line));
      scales[i] = s.scale + batch * s.batch_stride + tile * s.line_stride;
    }
  }
  // Copies those at steps [step, step + count), at most four.
  //   lines  how many of them the tile has
  __device__ __forceinline__ void Copy(const StepScales& s, uint32_t to, int32_t lines,
                                       int32_t step, int32_t count) const {
    if (s.fours) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < lines) CopyAsync16(to + i * kPitch, scales[i] + step, 4 * count);
      }
      return;
    }
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j, to += 4) {
      const int64_t at = s.steps_per_scale.Quotient(step + j) * s.step_stride;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i >= lines) continue;
        if (s.scale) {
          CopyAsync4(to + i * kPitch, scales[i] + at, 4);
        } else {
          StoreShared(to + i * kPitch, 1.0f);
        }
      }
    }
  }
};

// Arrives at the barrier when the copies that this thread has begun are there.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What does not change along K is found once for a tile. Loading warps share schedulers with math
// warps: what they issue delays one consumer warp, and its warpgroup waits for it.
template <typename L>
__device__ void LoadScales(const Arguments& a, uint32_t shared, Parts<false> parts, int32_t rank,
                           int32_t thread) {
  constexpr int kRows = L::kTileRows, kColumns = L::kRhsScales;
  constexpr int kColumnLines = (kColumns + kScaleThreads - 1) / kScaleThreads;
  const int32_t columns_here = (kColumns - thread + kScaleThreads - 1) / kScaleThreads;
  ThreadLines<kRows / kScaleThreads> rows;
  ThreadLines<kColumnLines> columns;
  Ring<L::kChunks> ring;
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
    rows.Find(a.lhs_scales, tile.batch, tile.row + thread, kScaleThreads);
    columns.Find(a.rhs_scales, tile.batch, tile.column + thread * L::kScaleColumns,
                 kScaleThreads * L::kScaleColumns);
#pragma unroll 1
    for (int32_t step = part.first; step < part.end; step += kChunkSteps, ring.Next()) {
      const uint32_t to = shared + L::kScalesAt + ring.stage * L::kChunkBytes + kLineBytes * thread;
      const int32_t count = min(kChunkSteps, part.end - step);
      WaitAsleep(shared + L::kChunkEmptyAt + 8 * ring.stage, ring.parity ^ 1);
      rows.Copy(a.lhs_scales, to, kRows / kScaleThreads, step, count);
      columns.Copy(a.rhs_scales, to + kLineBytes * kRows, columns_here, step, count);
      __threadfence_block();  // for a side without scales, whose ones are stored
      ArriveAfterCopies(shared + L::kChunkFullAt + 8 * ring.stage);
    }
  }
}

// Stores the fields of a line: its scale, the negative of its zero point z, its sum less depth * z,
// and a bias. A line beyond the last counts as the last.
//   pitch  from field to field
//   bias   null: the bias is 0
__device__ __forceinline__ void StoreLine(const StepScales& s, const ZeroPoints& zeros, uint32_t to,
                                          uint32_t pitch, int32_t batch, int32_t line,
                                          int32_t depth, const float* bias = nullptr,
                                          const Plane& bias_plane = {}) {
  const int32_t inside = min(line, s.last_line);
  const int64_t at = batch * s.batch_stride + s.tile_lines.Quotient(inside) * s.line_stride;
  const int32_t zero = zeros.zero_point ? zeros.zero_point[at] : 0;
  const int32_t sum = zeros.line_sums ? zeros.line_sums[batch * zeros.sums_batch + inside] : 0;
  StoreShared(to, s.scale ? s.scale[at] : 1.0f);
  StoreShared(to + pitch, -zero);
  StoreShared(to + 2 * pitch, sum - depth * zero);
  StoreShared(to + 3 * pitch, bias ? bias[bias_plane.At(batch, 0, inside)] : 0.0f);
}

// What follows the sums of each tile, for `Scaling::kAfter`.
template <typename L>
__device__ void LoadLines(const Arguments& a, uint32_t shared, Parts<false> parts, int32_t rank,
                          int32_t thread) {
  constexpr int kRows = L::kTileRows, kColumns = L::kTileColumns;
  const Elementwise& rest = a.epilogue.elementwise;
  const float* bias = a.stores_directly && rest.bias_plane ? rest.bias : nullptr;
  Ring<L::kChunks> ring;
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
    const uint32_t rows = shared + L::kScalesAt + ring.stage * L::kChunkBytes;
    const uint32_t columns = rows + 4 * kLineFields * kRows;
    WaitAsleep(shared + L::kChunkEmptyAt + 8 * ring.stage, ring.parity ^ 1);
#pragma unroll 1
    for (int32_t i = thread; i < kRows; i += kScaleThreads) {
      StoreLine(a.lhs_scales, a.lhs_zeros, rows + 4 * i, 4 * kRows, tile.batch, tile.row + i,
                static_cast<int32_t>(a.epilogue.depth));
    }
#pragma unroll 1
    for (int32_t i = thread; i < kColumns; i += kScaleThreads) {
      StoreLine(a.rhs_scales, a.rhs_zeros, columns + 4 * i, 4 * kColumns, tile.batch,
                tile.column + i, 0, bias, rest.bias_plane);
    }
    Arrive(shared + L::kChunkFullAt + 8 * ring.stage);
    ring.Next();
  }
}

// The masking warp of a CTA, where the contracted axis comes in groups. A step has 128 values of
// a line, and the first and the last step of a group may have values of other groups. The warp
// waits until such a stage has landed, and sets these values to zero on both sides, since zero
// times NaN is NaN. Then the stage is full.
//
//   line of a stage   | o o o x x x x x x o |    x: of the group    o: of others, set to zero

// The bytes of a word from `first` on.
__device__ __forceinline__ uint32_t BytesFrom(int32_t first) {
  return first <= 0 ? ~0u : first >= 4 ? 0u : ~0u << 8 * first;
}

// Zeros in bytes outside [first, end) of swizzled lines of 128 bytes; by a warp, of which each
// thread has every 32nd line.
template <int kLines>
__device__ __forceinline__ void MaskLines(uint32_t lines, int32_t first, int32_t end) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t byte = 0; byte < kStepDepth; byte += 16) {
    if (first <= byte && end >= byte + 16) continue;
    const uint32_t at = lines + lane * kStepDepth + (byte ^ lane % 8 * 16);
    if (first >= byte + 16 || end <= byte) {
#pragma unroll
      for (int i = 0; i < kLines / 32; ++i) StoreShared4(at + i * 32 * kStepDepth, 0, 0, 0, 0);
      continue;
    }
    uint32_t kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept[i] = BytesFrom(first - byte - 4 * i) & ~BytesFrom(end - byte - 4 * i);
    }
#pragma unroll 2
    for (int i = 0; i < kLines / 32; ++i) {
      const int4 v = LoadInts(at + i * 32 * kStepDepth);
      StoreShared4(at + i * 32 * kStepDepth, v.x & kept[0], v.y & kept[1], v.z & kept[2],
                   v.w & kept[3]);
    }
  }
}

template <typename L>
__device__ void MaskTiles(const Arguments& a, uint32_t shared, Parts<false> parts, int32_t rank) {
  Ring<L::kStages> ring;
  uint32_t parities = 0;  // of the landed barriers, a bit each: few stages land
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
#pragma unroll 1
    for (int32_t step = part.first; step < part.end; ++step, ring.Next()) {
      if (!tile.depth.Cuts(step)) continue;
      const int32_t first = tile.depth.first - step * kStepDepth;
      const int32_t end = tile.depth.end - step * kStepDepth;
      WaitAsleep(shared + L::kLandedAt + 8 * ring.stage, parities >> ring.stage & 1);
      parities ^= 1u << ring.stage;
      MaskLines<L::kTileRows>(shared + L::kLhsAt + ring.stage * L::kLhsBytes, first, end);
      MaskLines<L::kTileColumns>(shared + L::kRhsAt + ring.stage * L::kRhsBytes, first, end);
      FenceAsyncProxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(shared + L::kFullAt + 8 * ring.stage);
    }
  }
}

}  // namespace jaxfp8::cuda::sm90
