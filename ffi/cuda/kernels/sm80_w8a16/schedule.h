// Which block of `sm80_w8a16` computes which part of the product: a Stream-K decomposition.
//
// An iteration is one output tile and one tile of K. Iterations are numbered with K fastest, and
// blocks take equal, consecutive shares:
//
//   output tile    0               1               2
//   iteration      0 1 2 3 4 5 | 6 7 8 9 ...   | ...
//   block          0 0 0 0 1 1 | 1 1 2 2 2 2   | 3 3 3 3 ...
//   partial tile   0       1   | 2   3         | 5          = block + output tile
//
// Every block stores its accumulators of every output tile in a partial tile of its own. A second
// kernel (split_k.cuh) adds the partial tiles of an output tile up in the order of the blocks. So
// the bits are the same in every run, and no block waits for another.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_SCHEDULE_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/platform.h"
#include "cuda/device.h"
#include "cuda/kernels/sm80_w8a16/layout.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::w8a16 {

// Limits of a tile of 8 * row_fragments rows.

// Whether scales may change along K, which takes a second set of accumulators (scales.cuh). The
// widest tile has no registers left for it.
JAXFP8_HD constexpr bool KeepsScaledAccumulators(int row_fragments) { return row_fragments <= 4; }
// Blocks on a multiprocessor at a time, which limits the registers of each. With up to 16 rows only
// three blocks fit shared memory, and the fourth's registers are free for the second kernel. On an
// H200, two blocks of 256 columns each are 1.26x slower with 64 rows of 6144 x 4096 weights.
JAXFP8_HD constexpr int BlocksPerSm(int row_fragments) { return row_fragments <= 2 ? 4 : 3; }
// Stages in shared memory that still let those blocks run on an H200.
JAXFP8_HD constexpr int StagesFor(int row_fragments) {
  return row_fragments == 1 ? 4 : row_fragments <= 4 ? 3 : 2;
}

JAXFP8_HD constexpr int StageBytes(int row_fragments) {
  return kWeightBytes + row_fragments * 8 * kActivationChunks * 16;
}
JAXFP8_HD constexpr int SharedBytes(int row_fragments) {
  return StagesFor(row_fragments) * StageBytes(row_fragments);
}

// Whether sm_90a uses wgmma, for which activations are packed beforehand by a launch of their own.
// On an H200 and 14336 x 4096 weights it is 1.22x faster than mma.sync with 64 rows, 1.09x with 32.
JAXFP8_HD constexpr bool PacksActivations(int row_fragments) { return row_fragments >= 4; }
// Bytes of packed activations in a tile, and in one of its eight steps along K.
JAXFP8_HD constexpr int PackedBytes(int row_fragments) {
  return row_fragments * 8 * kTileDepth * 2;
}
JAXFP8_HD constexpr int PackedStepBytes(int row_fragments) {
  return PackedBytes(row_fragments) / 8;
}

// An output tile, in tiles along each axis.
struct TileCoord {
  int32_t batch, column_tile, row_tile;
};

// The iterations of one launch. 32 bits, because a block divides a few times before its first load
// and 64-bit divisions are slow.
struct Schedule {
  int32_t column_tiles = 1, row_tiles = 1, depth_tiles = 1;
  int32_t first = 0, output_tiles = 1;  // the first output tile of the launch, and how many
  int32_t blocks = 1;
  int32_t iterations_per_block = 1;
  int32_t longer_blocks = 0;  // how many blocks, the first ones, have one more

  int64_t Iterations() const { return int64_t{output_tiles} * depth_tiles; }
  void SplitAmong(int64_t among) {
    blocks = static_cast<int32_t>(among);
    iterations_per_block = static_cast<int32_t>(Iterations() / among);
    longer_blocks = static_cast<int32_t>(Iterations() % among);
  }

  // The first iteration of a block. It ends before that of the next block.
  JAXFP8_HD int32_t Begin(int32_t block) const {
    return block * iterations_per_block + (block < longer_blocks ? block : longer_blocks);
  }
  JAXFP8_HD int32_t BlockOf(int32_t iteration) const {
    const int32_t first_short = longer_blocks * (iterations_per_block + 1);
    return iteration < first_short
               ? iteration / (iterations_per_block + 1)
               : longer_blocks + (iteration - first_short) / iterations_per_block;
  }

  // Row tiles are numbered fastest: the output tiles that read the same weights run together, and
  // find them in L2.
  JAXFP8_HD TileCoord CoordOf(int32_t output_tile) const {
    const int32_t columns = (first + output_tile) / row_tiles, batches = columns / column_tiles;
    return {batches, columns - batches * column_tiles, first + output_tile - columns * row_tiles};
  }

  // The first and the last of the blocks that share an output tile.
  JAXFP8_HD int32_t FirstBlock(int32_t output_tile) const {
    return BlockOf(output_tile * depth_tiles);
  }
  JAXFP8_HD int32_t LastBlock(int32_t output_tile) const {
    return BlockOf((output_tile + 1) * depth_tiles - 1);
  }
  // The index of a partial tile. From one pair to the next the block or the output tile grows, so
  // the sum is unique.
  JAXFP8_HD int32_t PartialOf(int32_t block, int32_t output_tile) const {
    return block + output_tile;
  }
  int64_t Partials() const { return int64_t{blocks} + output_tiles - 1; }
};

// The rows of the smallest tile that holds all rows of the problem, or of the largest tile; in
// units of 8: 1, 2, 4 or 8.
int RowFragmentsFor(const Problem& problem);

// How many output tiles the whole problem has.
int64_t OutputTiles(const Problem& problem);

size_t PartialTileBytes(const Problem& problem);

// Bytes of all packed activations.
size_t PackedBytesOf(const Problem& problem);

// The schedule of a launch from output tile `first` on, of as many as fit into `workspace`.
//   blocks_at_once  blocks that the device runs at a time
//   workspace       bytes for partial tiles, accepted by `WhyNotWorkspace`
Schedule MakeSchedule(const Problem& problem, int64_t blocks_at_once, size_t workspace,
                      int64_t first);

// Why the kernel cannot work within `workspace` bytes, `packed` of them for packed activations; ""
// if it can.
std::string WhyNotWorkspace(const Problem& problem, size_t packed, size_t workspace);

// Why the kernel cannot compute the problem, whose rhs is the 8-bit side; "" if it can.
// `WhyNotForm` asks about the problem alone, `WhyNotProblem` about the device too.
std::string WhyNotForm(const Problem& problem);
std::string WhyNotProblem(const Problem& problem, const Device& device);

// Bytes of workspace beyond which the kernel is no faster on any device.
size_t BestWorkspace(const Problem& problem);

// Whether the 8-bit side is the left one, and the problem with it on the right.
bool HasWeightsOnLeft(const Problem& problem);
Problem WithWeightsOnRight(const Problem& problem);

// `WhyNotProblem`, whichever side is the 8-bit one.
std::string WhyNotEither(const Problem& problem, const Device& device);

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_SCHEDULE_H_
