// Tiles of `sm80_imma` in shared memory, and which values a lane multiplies.
//
// A block computes 16 * kRowFragments rows and 128 columns, 64 of K a stage. A warp takes 32 of the
// columns and all rows. Its four B fragments (8 columns each) are interleaved, so that a lane has
// four neighbouring columns of the weights, and eight of the sums:
//
//   column 4c + j of the warp  =  column c of fragment j
//
//   lane 4g + t    weights    columns 4g to 4g + 3
//                  sums       rows g and g + 8 of each fragment, columns 8t to 8t + 7
//
// A tile is rows of chunks of 16 bytes. Chunks are swizzled within a row (XOR with bits of the
// row), so that lanes that access shared memory together hit different banks.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_LAYOUT_H_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_LAYOUT_H_

#include "common/platform.h"

namespace jaxfp8::cuda::imma {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kWarpColumns = 32, kTileColumns = kWarps * kWarpColumns;
inline constexpr int kTileDepth = 64, kStepDepth = 32, kSteps = kTileDepth / kStepDepth;
inline constexpr int kStages = 4;

// Lines of 64 codes along K. Eight neighbouring lines are read together, one chunk of each.
template <int kLines>
struct CodeTile {
  static constexpr int kRows = kLines, kChunks = 4, kElementBytes = 1;
  static constexpr int kBytes = kRows * kChunks * 16;
  JAXFP8_HD static int At(int row, int chunk) { return row * 64 + (chunk ^ (row / 2 % 4)) * 16; }
};

// Lines of 64 values of 16 bits along K. Lanes read half a chunk: two chunks of four neighbouring
// lines together; or whole lines.
template <int kLines>
struct WideTile {
  static constexpr int kRows = kLines, kChunks = 8, kElementBytes = 2;
  static constexpr int kBytes = kRows * kChunks * 16;
  JAXFP8_HD static int At(int row, int chunk) { return row * 128 + (chunk ^ (row % 4 * 2)) * 16; }
};

// 64 rows of 128 codes along N, a row for each K. Lanes read a word: two chunks of four rows that
// are four apart together.
struct TransposedTile {
  static constexpr int kRows = kTileDepth, kChunks = 8, kElementBytes = 1;
  static constexpr int kBytes = kRows * kChunks * 16;
  JAXFP8_HD static int At(int row, int chunk) {
    return row * 128 + (chunk ^ (row / 4 % 4 * 2)) * 16;
  }
};

inline constexpr int kWeightBytes = TransposedTile::kBytes;
static_assert(CodeTile<kTileColumns>::kBytes == kWeightBytes);

// The shared memory of a block: its stages, and for 16-bit activations that the block rounds once
// two tiles of their codes.
//   element_bytes  of an activation
JAXFP8_HD constexpr int SharedBytes(int element_bytes, int row_fragments) {
  const int codes = 16 * row_fragments * kTileDepth;
  const bool prepares = element_bytes > 1 && row_fragments > 1;
  return kStages * (kWeightBytes + codes * element_bytes) + (prepares ? 2 * codes : 0);
}

// The column that is row `row` of a `CodeTile` of weights: fragments lie one after the other.
JAXFP8_HD int ColumnOfRow(int row) { return row / 32 * 32 + row % 8 * 4 + row / 8 % 4; }

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LAYOUT_H_
