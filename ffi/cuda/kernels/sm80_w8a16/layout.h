// Tiles of `sm80_w8a16` in shared memory, and which values a lane multiplies.
//
// A block computes output tiles of 8 * kRowFragments rows and kTileColumns columns, kTileDepth of K
// per pass. A lane takes 16 consecutive depths and four consecutive columns, so that it can use
// vector loads and stores:
//
//   lane             depths in steps 0-3      in steps 4-7          columns of its warp
//   4g + t, t < 4    16t ... 16t + 15         64 + 16t ... + 15     4g ... 4g + 3
//
// The instruction defines its own order of depths (2t, 2t + 1, 2t + 8, 2t + 9). A sum over K may
// take its terms in any order, as long as both operands use the same.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_

#include <cstdint>

#include "common/platform.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kWarpColumns = 32, kTileColumns = kWarps * kWarpColumns;
inline constexpr int kTileDepth = 128;

// Weights in shared memory: 128 rows of 128 bytes in chunks of 16. A row is a column of the weights
// ([N, K]) or a depth ([K, N]).
inline constexpr int kWeightRows = 128, kWeightChunks = 8;
inline constexpr int kWeightBytes = kWeightRows * kWeightChunks * 16;
static_assert(kTileColumns == 128 && kTileDepth == 128);

// Activations in shared memory: 16 chunks for each row.
inline constexpr int kActivationChunks = kTileDepth * 2 / 16;

// Chunks are swizzled within a row (XOR with bits of the row), so that lanes that load together hit
// different banks. [N, K]: eight lanes read four chunks of two rows that are four apart.
JAXFP8_HD int KContiguousOffset(int row, int chunk) { return row * 128 + (chunk ^ (row & 4)) * 16; }
// [K, N]: 32 lanes read two chunks of four rows that are sixteen apart.
JAXFP8_HD int MnMajorOffset(int row, int chunk) {
  return row * 128 + (chunk ^ (row >> 4 & 3) * 2) * 16;
}
// Activations: eight lanes read every second chunk of two neighbouring rows.
JAXFP8_HD int ActivationOffset(int row, int chunk) { return row * 256 + (chunk ^ (row & 1)) * 16; }

// The first of the four depths that a lane multiplies in a step, 0 to 7, of a tile.
JAXFP8_HD int DepthOf(int lane, int step) {
  return (step / 4) * 64 + (lane % 4) * 16 + step % 4 * 4;
}

// The first of the four columns of a lane. The first two are rows g and g + 8 of the first fragment
// of weights, the other two are those of the second fragment.
JAXFP8_HD int ColumnOf(int warp, int lane) { return warp * kWarpColumns + lane / 4 * 4; }

// The first of the two rows of a lane in a fragment of accumulators.
JAXFP8_HD int RowOf(int lane, int fragment) { return fragment * 8 + lane % 4 * 2; }
// The row whose activations a lane loads for a fragment.
JAXFP8_HD int ActivationRowOf(int lane, int fragment) { return fragment * 8 + lane / 4; }

// Selectors of `PickBytes` that put two codes into the 16-bit halves of a word, sign-extended.
// [N, K]: depths 2 * pair and 2 * pair + 1 of a word that holds four depths of a column.
JAXFP8_HD constexpr uint32_t PickDepths(int pair) { return pair == 0 ? 0x9180u : 0xb3a2u; }
// [K, N]: one column, 0 to 3, of two words that hold four columns of one depth each.
JAXFP8_HD constexpr uint32_t PickColumn(uint32_t column) { return 0xc480u + 0x1111u * column; }

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_
