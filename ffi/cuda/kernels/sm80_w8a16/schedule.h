// Which block of `sm80_w8a16` makes which part of the product.
//
// The work is a line of steps, one for each tile of the output and each kTileDepth of its depth,
// depth fastest; blocks take equal stretches of it. Every block puts its sums of every tile into a
// slot of its own, and a second kernel adds those of a tile up, in the order of the blocks: the
// same bits every time, and nobody waits for anybody.

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

// The widest tile has no registers left for sums beside its sums: scales that change along the
// depth need both.
JAXFP8_HD constexpr bool FoldsFor(int eights) { return eights <= 4; }
// Blocks to live on a multiprocessor at a time, and the stages of the pipeline that lets them on an
// H200. Up to 16 rows registers are left as if for a fourth, so that blocks of the kernel that
// finishes find room beside three. There four blocks are no faster with 8 rows. With 64 rows two
// blocks of 256 columns each take 26 % longer for 6144 x 4096 weights, 5 % longer for 14336 x 4096,
// and up to 7 % less for 28672 x 8192.
JAXFP8_HD constexpr int BlocksFor(int eights) { return eights <= 2 ? 4 : 3; }
JAXFP8_HD constexpr int StagesFor(int eights) { return eights == 1 ? 4 : eights <= 4 ? 3 : 2; }

JAXFP8_HD constexpr int StageBytes(int eights) {
  return kWeightBytes + eights * 8 * kActivationChunks * 16;
}
JAXFP8_HD constexpr int SharedBytes(int eights) { return StagesFor(eights) * StageBytes(eights); }

// Whether the activations are packed beforehand where the device has the instruction of a
// warpgroup. On an H200, 64 rows of 14336 x 4096 weights take 18 % less than with the instruction
// of a warp, and 32 rows 8 % less; 32 rows of 1024 x 8192 take 12 % more, the additional launch.
JAXFP8_HD constexpr bool PacksFor(int eights) { return eights >= 4; }
// Bytes of packed activations in a tile, and in one of its eight steps.
JAXFP8_HD constexpr int PackedBytes(int eights) { return eights * 8 * kTileDepth * 2; }
JAXFP8_HD constexpr int PackedStepBytes(int eights) { return PackedBytes(eights) / 8; }

struct Place {
  int32_t batch, column_tile, row_tile;
};

// In 32 bits: a block divides a few times before its first load, and 64-bit divisions are slow.
struct Schedule {
  int32_t column_tiles = 1, row_tiles = 1, depth_tiles = 1;
  int32_t first = 0, outputs = 1;  // of a launch
  int32_t blocks = 1;
  int32_t each = 1, longer = 0;  // steps of a block, and how many blocks have one more

  int64_t Steps() const { return int64_t{outputs} * depth_tiles; }
  void Share(int64_t among) {
    blocks = static_cast<int32_t>(among);
    each = static_cast<int32_t>(Steps() / among);
    longer = static_cast<int32_t>(Steps() % among);
  }

  // The first step of a block; the one of the next is where it ends.
  JAXFP8_HD int32_t Begin(int32_t block) const {
    return block * each + (block < longer ? block : longer);
  }
  JAXFP8_HD int32_t BlockOf(int32_t step) const {
    const int32_t border = longer * (each + 1);
    return step < border ? step / (each + 1) : longer + (step - border) / each;
  }

  // Tiles of one stretch of columns stand together: L2 then holds their weights.
  JAXFP8_HD Place PlaceOf(int32_t output) const {
    const int32_t columns = (first + output) / row_tiles, batches = columns / column_tiles;
    return {batches, columns - batches * column_tiles, first + output - columns * row_tiles};
  }

  // The blocks that share an output: first to last.
  JAXFP8_HD int32_t FirstBlock(int32_t output) const { return BlockOf(output * depth_tiles); }
  JAXFP8_HD int32_t LastBlock(int32_t output) const {
    return BlockOf((output + 1) * depth_tiles - 1);
  }
  // Along the line of steps either the block or the output changes, or both.
  JAXFP8_HD int32_t SlotOf(int32_t block, int32_t output) const { return block + output; }
  int64_t Slots() const { return int64_t{blocks} + outputs - 1; }
};

// The smallest tile that holds the rows, in multiples of 8 rows: 1, 2, 4 or 8.
int EightsFor(const Problem& problem);

// The outputs of a whole problem.
int64_t OutputsOf(const Problem& problem);

size_t SlotBytes(const Problem& problem);

// Of all packed activations.
size_t PackedBytesOf(const Problem& problem);

// The schedule of the outputs from `first`, as many as fit into `workspace`, for `resident` blocks
// at a time. The workspace has been accepted by `WhyNotWorkspace`.
Schedule MakeSchedule(const Problem& problem, int64_t resident, size_t workspace, int64_t first);

// Why the kernel cannot work within `workspace` bytes, `packed` of them for packed activations; ""
// if it can.
std::string WhyNotWorkspace(const Problem& problem, size_t packed, size_t workspace);

// Why the kernel cannot compute the problem, whose rhs is the 8-bit side; "" if it can. Without a
// device: on any that it is compiled for.
std::string WhyNotForm(const Problem& problem);
std::string WhyNotProblem(const Problem& problem, const Device& device);

// Bytes of workspace beyond which the kernel is no faster, on any device.
size_t BestWorkspace(const Problem& problem);

// Whether the 8-bit side is the left one; the problem with it on the right.
bool WeightsOnTheLeft(const Problem& problem);
Problem WeightsRight(const Problem& problem);

// `WhyNotProblem`, whichever side is the 8-bit one.
std::string WhyNotEither(const Problem& problem, const Device& device);

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_SCHEDULE_H_
