// Where everything is in the kernel `sm80_w8a16`: tiles in shared memory, values in fragments.
//
// A block makes tiles of 8 * kEights rows and kTileColumns columns of the output,
// kTileDepth of the depth at a time. A sum over the depth may take its terms in any order, the same
// for both sides: a lane takes 16 neighbouring depths, so that it can load vectors, and the
// instruction, which believes in depths 2t, 2t + 1, 2t + 8 and 2t + 9, does not notice. Likewise a
// lane takes four neighbouring columns, so that it can load and store vectors of those.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_

#include <cstdint>

#include "common/platform.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kWarpColumns = 32, kTileColumns = kWarps * kWarpColumns;
inline constexpr int kTileDepth = 128;

// Weights in shared memory: 128 lines of 128 bytes in chunks of 16, a line being a column of the
// product ([N, K]) or a depth of it ([K, N]).
inline constexpr int kWeightLines = 128, kWeightChunks = 8;
inline constexpr int kWeightBytes = kWeightLines * kWeightChunks * 16;
static_assert(kTileColumns == 128 && kTileDepth == 128);

// Activations: a line of 16 chunks for each row.
inline constexpr int kActivationChunks = kTileDepth * 2 / 16;

// Chunks change places within a line so that the lanes which load together meet all banks: eight
// lanes read four chunks of two columns four lines apart, ...
JAXFP8_HD int ColumnLineOffset(int line, int chunk) {
  return line * 128 + (chunk ^ (line & 4)) * 16;
}
// ... 32 lanes read two chunks of four depths sixteen lines apart, ...
JAXFP8_HD int DepthLineOffset(int line, int chunk) {
  return line * 128 + (chunk ^ (line >> 4 & 3) * 2) * 16;
}
// ... eight lanes read every second chunk of two neighbouring rows.
JAXFP8_HD int ActivationOffset(int row, int chunk) { return row * 256 + (chunk ^ (row & 1)) * 16; }

// The depths of a lane in step 0 to 7 of a tile: this one and the next three.
JAXFP8_HD int DepthOf(int lane, int step) {
  return (step / 4) * 64 + (lane % 4) * 16 + step % 4 * 4;
}

// The columns of a lane: this one and the next three. The first of them are rows g and g + 8 of the
// first fragment of weights, the others those of the second.
JAXFP8_HD int ColumnOf(int warp, int lane) { return warp * kWarpColumns + lane / 4 * 4; }

// The rows of a lane in fragment `eight` of sums: this one and the next.
JAXFP8_HD int RowOf(int lane, int eight) { return eight * 8 + lane % 4 * 2; }
// The row whose activations it loads.
JAXFP8_HD int ActivationRowOf(int lane, int eight) { return eight * 8 + lane / 4; }

// Selectors of `PickBytes` that put two codes into the lanes of a word, their signs above them.
// [N, K]: depths 2 * pair and 2 * pair + 1 of a word that holds four depths of a column.
JAXFP8_HD constexpr uint32_t PickDepths(int pair) { return pair == 0 ? 0x9180u : 0xb3a2u; }
// [K, N]: column 0 to 3 of two words that hold four columns of a depth each.
JAXFP8_HD constexpr uint32_t PickColumn(uint32_t column) { return 0xc480u + 0x1111u * column; }

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_LAYOUT_H_
