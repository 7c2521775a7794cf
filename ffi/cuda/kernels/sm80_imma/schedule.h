// The problems of `sm80_imma`, the grid of a launch, and its scratch memory. Pure: needs no GPU.

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/platform.h"
#include "common/status.h"
#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::imma {

// With 64 rows, rounding the weights first was 1.2x to 1.35x faster on an H200.
inline constexpr int64_t kMaxRows = 32;
inline constexpr int kThreads = 256;
inline constexpr int kBlockDepth = 64;  // K of a warp's step
inline constexpr int kMaxSplit = 8;     // CTAs of a cluster

// Why the path cannot compute a problem, with the weights on either side.
Status WhyNot(const Problem& problem, const Device& device);
// The same for a problem with the weights on the right, on any device.
Status WhyNotForm(const Problem& problem);

// The problem with the FP8 weights as its right side.
bool HasWeightsOnLeft(const Problem& problem);
Problem WithWeightsOnRight(const Problem& problem);

// Rows in units of 8: 1, 2 or 4.
int RowTilesFor(int64_t rows);
// Columns of a CTA in units of 16. More rows are read by fewer CTAs.
JAXFP8_HD constexpr int ColumnTiles(int row_tiles) { return row_tiles <= 2 ? 1 : 2; }

// The shared memory of a CTA: its weights, a line for each column; sums, a line for each row; two
// maxima for each column. In bytes; a bank group has 16. Lines are an odd number of four
// groups, or of one, apart: neighbouring lines lie in other banks.
JAXFP8_HD constexpr int WeightPitch(int depth) { return (depth / kBlockDepth | 1) * kBlockDepth; }
JAXFP8_HD constexpr int SumPitch(int row_tiles) { return 16 * ColumnTiles(row_tiles) + 4; }
JAXFP8_HD constexpr int SharedBytes(int row_tiles, int depth) {
  const int columns = 16 * ColumnTiles(row_tiles);
  return columns * WeightPitch(depth) + 4 * 8 * row_tiles * SumPitch(row_tiles) + 2 * 4 * columns;
}

// The CTAs of a launch: [column tiles, split, batch]. Those of a split are a cluster.
struct SplitGrid {
  int row_tiles = 1, column_tiles = 1, split = 1;
  int depth = 0;  // of a CTA, a multiple of kBlockDepth
};
SplitGrid MakeSchedule(const Problem& problem, const Device& device);

// Where the codes of activations and their scales lie in the workspace, for activations that are
// not int8 in aligned lines along K. Lines of codes are `pitch` bytes apart.
struct CodesScratch {
  int64_t pitch = 0;
  size_t scales = 0, bytes = 0;
};
CodesScratch ScratchOf(const Problem& problem);

}  // namespace jaxfp8::cuda::imma
