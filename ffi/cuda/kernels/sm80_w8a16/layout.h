// Tiles of `sm80_w8a16` in shared memory, and the values multiplied by each lane.
//
// A CTA computes an output tile of 8 * kRowFragments rows and kTileColumns columns, kTileDepth of
// K per pass. A lane takes four consecutive columns, and in each of the eight steps of a pass four
// depths:
//
//   order     depths of lane 4g + t, step s                   columns of its warp
//   kRuns     64 (s / 4) + 16t + 4 (s % 4) + 0 ... 3          4g ... 4g + 3
//   kBlocks   32 (s / 2) + 8t + 4 (s % 2) + 0 ... 3           the same
//   kWgmma    16s + 2t, + 1, + 8, + 9                         the same
//
// kWgmma is the instruction's own order, because the tensor cores read the activations from shared
// memory. mma.sync takes its activations from registers. A sum over K may take its terms in any
// order if both operands use the same one. With kRuns a lane has 16 consecutive depths in four
// steps, and both operands are loaded by vectors. With the other two, two steps are 32 neighbours
// of K, the depth of the finest scales. On an H200 a row per column takes 19.0 us by kRuns with
// 14336 x 4096 weights, 19.1 by kBlocks; in [K, N] 20.5 and 21.5.

#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/platform.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kWarpColumns = 32, kTileColumns = kWarps * kWarpColumns;
inline constexpr int kTileDepth = 128;

// The order of a lane's depths.
enum class Order { kRuns, kBlocks, kWgmma };

// Weights in shared memory: 128 rows of 128 bytes in chunks of 16. A row is a column of the weights
// ([N, K]) or a depth ([K, N]).
inline constexpr int kWeightRows = 128, kWeightChunks = 8;
inline constexpr int kWeightBytes = kWeightRows * kWeightChunks * 16;
static_assert(kTileColumns == 128 && kTileDepth == 128);

// Fine scales in shared memory: 128 slots of four float32 (fine_scales.cuh).
inline constexpr int kFineSlots = 128, kFineScaleBytes = kFineSlots * 16;
// K of the finest ones.
inline constexpr int kFineDepth = 32;

// Activations in shared memory: each row has 16 chunks of eight values. 8-bit activations fill the
// first half of a chunk.
inline constexpr int kActivationChunks = kTileDepth * 2 / 16;

// Chunks are swizzled within a row (XOR with bits of the row) to avoid bank conflicts. [N, K], rows
// four apart: eight lanes read four chunks of two rows (kRuns), 16 lanes two chunks of four rows
// (kBlocks), 32 lanes one chunk of eight rows (kWgmma).
template <Order kOrder>
JAXFP8_HD int KContiguousOffset(int row, int chunk) {
  const int turn = kOrder == Order::kRuns     ? row & 4
                   : kOrder == Order::kBlocks ? (row >> 2 & 3) * 2
                                              : row >> 2 & 7;
  return row * 128 + (chunk ^ turn) * 16;
}
// [K, N]: 32 lanes read two chunks of four rows, 16, eight or two rows apart.
template <Order kOrder>
JAXFP8_HD int MnMajorOffset(int row, int chunk) {
  constexpr int kShift = kOrder == Order::kRuns ? 4 : kOrder == Order::kBlocks ? 3 : 1;
  return row * 128 + (chunk ^ (row >> kShift & 3) * 2) * 16;
}
// Activations for mma.sync: eight lanes read four chunks of two neighbouring rows, every second one
// by kRuns.
template <Order kOrder>
JAXFP8_HD int ActivationOffset(int row, int chunk) {
  return row * 256 + (chunk ^ (row & 1) * (kOrder == Order::kRuns ? 1 : 4)) * 16;
}
// Activations for wgmma: two halves of K, each of rows of 128 bytes with the instruction's own
// swizzle of eight rows (kSwizzle128 of wgmma.cuh).
JAXFP8_HD int WgmmaActivationOffset(int rows, int row, int chunk) {
  return (chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16;
}

// The tensor core instruction's type for the activations.
constexpr DType WideOf(DType activation) { return IsFloat8(activation) ? DType::kF16 : activation; }

// A tile of sums in shared memory: each column has this many float32, four of them padding against
// bank conflicts.
inline constexpr int kSumPitch = kTileColumns + 4;

// The i-th of a lane's four depths in a step of a tile, 0 to 7.
template <Order kOrder>
JAXFP8_HD int DepthOf(int lane, int step, int i) {
  const int t = lane % 4;
  if (kOrder == Order::kWgmma) return 16 * step + t * 2 + i / 2 * 8 + i % 2;
  return kOrder == Order::kRuns ? step / 4 * 64 + t * 16 + step % 4 * 4 + i
                                : step / 2 * 32 + t * 8 + step % 2 * 4 + i;
}

// The first of the four columns of a lane. The first two columns are rows g and g + 8 of the first
// fragment of weights, the other two are rows g and g + 8 of the second.
JAXFP8_HD int ColumnOf(int warp, int lane) { return warp * kWarpColumns + lane / 4 * 4; }

// The first of the two rows of a lane in a fragment of accumulators.
JAXFP8_HD int RowOf(int lane, int fragment) { return fragment * 8 + lane % 4 * 2; }
// The row of a lane's activations in a fragment.
JAXFP8_HD int ActivationRowOf(int lane, int fragment) { return fragment * 8 + lane / 4; }

// `PickBytes` selectors: they put two codes into the 16-bit halves of a word, sign-extended. [N,
// K]: depths 2 * pair and 2 * pair + 1 of a word with four depths of a column.
JAXFP8_HD constexpr uint32_t PickDepths(int pair) { return pair == 0 ? 0x9180u : 0xb3a2u; }
// [K, N]: one column, 0 to 3, of two words with four columns of one depth each.
JAXFP8_HD constexpr uint32_t PickColumn(uint32_t column) { return 0xc480u + 0x1111u * column; }

}  // namespace jaxfp8::cuda::w8a16
