// Tiles of `sm80_w8a16` in shared memory, and which values a lane multiplies.
//
// A block computes an output tile of 8 * kRowFragments rows and kTileColumns columns, kTileDepth of
// K per pass. A lane takes four consecutive columns, and in each of the eight steps of a pass four
// depths:
//
//   lane             mma.sync, step s        wgmma, step s                   columns of its warp
//   4g + t, t < 4    64 (s / 4) + 16t        16s + 2t, + 1, + 8, + 9         4g ... 4g + 3
//                    + 4 (s % 4) + 0 ... 3
//
// The order of wgmma is that of the instruction, because the tensor cores read the activations as
// they are stored. mma.sync takes its activations from registers. A sum over K may take its terms
// in any order, as long as both operands use the same: with the order above a lane has 16
// consecutive depths in four steps, and both operands are loaded by vectors.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_

#include <cstdint>

#include "common/dtype.h"
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

// Activations in shared memory: 16 chunks for each row, of eight values. Those of 8 bits fill the
// first half of a chunk.
inline constexpr int kActivationChunks = kTileDepth * 2 / 16;

// Chunks are swizzled within a row (XOR with bits of the row), so that lanes that load together hit
// different banks. [N, K]: for mma.sync, eight lanes read four chunks of two rows that are four
// apart; for wgmma, 32 lanes read one chunk of eight such rows.
template <bool kWgmma>
JAXFP8_HD int KContiguousOffset(int row, int chunk) {
  return row * 128 + (chunk ^ (kWgmma ? row >> 2 & 7 : row & 4)) * 16;
}
// [K, N]: 32 lanes read two chunks of four rows, which are sixteen apart for mma.sync and two for
// wgmma.
template <bool kWgmma>
JAXFP8_HD int MnMajorOffset(int row, int chunk) {
  return row * 128 + (chunk ^ (row >> (kWgmma ? 1 : 4) & 3) * 2) * 16;
}
// Activations for mma.sync: eight lanes read every second chunk of two neighbouring rows.
JAXFP8_HD int ActivationOffset(int row, int chunk) { return row * 256 + (chunk ^ (row & 1)) * 16; }
// Activations for wgmma: two halves of K, each of rows of 128 bytes with the instruction's own
// swizzle of eight rows (kSwizzle128 of wgmma.cuh).
JAXFP8_HD int WgmmaActivationOffset(int rows, int row, int chunk) {
  return (chunk / 8 * rows + row) * 128 + ((chunk ^ row) & 7) * 16;
}

// The type that activations are multiplied in.
constexpr DType WideOf(DType activation) { return IsFloat8(activation) ? DType::kF16 : activation; }

// A tile of sums in shared memory: rows of this many float32 for each column, and four more so that
// lanes that store together hit different banks.
inline constexpr int kSumPitch = kTileColumns + 4;

// The i-th of the four depths that a lane multiplies in a step, 0 to 7, of a tile.
template <bool kWgmma>
JAXFP8_HD int DepthOf(int lane, int step, int i) {
  return kWgmma ? 16 * step + lane % 4 * 2 + i / 2 * 8 + i % 2
                : step / 4 * 64 + lane % 4 * 16 + step % 4 * 4 + i;
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
