// The split-K decomposition of `sm80_w8a16`: each CTA's part of the product.
//
// Each output tile has `split` CTAs. They take its tiles of K in turns. With split = 3 and 8
// tiles of K:
//
//   output tile   0                 1                 ...     blockIdx.x
//   tile of K     0 1 2 3 4 5 6 7   0 1 2 3 4 5 6 7
//   rank          0 1 2 0 1 2 0 1   0 1 2 0 1 2 0 1           blockIdx.y
//
// Ranks read neighbouring bytes of [N, K] weights at about the same time. DRAM reads these 1.03x to
// 1.07x faster, for up to 16 rows on an H100.
//
// The sums of all ranks are added in the order of ranks: the bits are the same in every run. From
// sm_90 on the ranks of an output tile are a thread block cluster and add in shared memory. Before,
// ranks store partial tiles in the workspace and a second kernel adds them (path.cu). A
// tile with one CTA needs neither.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/platform.h"
#include "common/status.h"
#include "cuda/device.h"
#include "cuda/kernels/sm80_w8a16/layout.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::w8a16 {

// Limits of a tile of 8 * row_fragments rows.

// Whether scales may change along K. This takes a second set of accumulators (scales.cuh), and the
// widest tile has no registers left for it.
JAXFP8_HD constexpr bool KeepsScaledAccumulators(int row_fragments) { return row_fragments <= 4; }
// CTAs on a multiprocessor at a time. This limits the registers of each.
inline constexpr int kCtasPerSm = 3;
// The same with fine scales (`HasFineScales`): two sets of accumulators for the widest tile take
// more registers, and three stages more shared memory.
JAXFP8_HD constexpr int FineCtasPerSm(int row_fragments) { return row_fragments >= 4 ? 2 : 3; }
// As many stages as shared memory has for those CTAs on an H100.
JAXFP8_HD constexpr int StagesFor(int row_fragments) { return row_fragments <= 4 ? 3 : 2; }
inline constexpr int kFineStages = 3;

// Whether sm_90a uses wgmma. On an H200 and 14336 x 4096 weights it is 1.22x faster than mma.sync
// with 64 rows, 1.09x with 32.
JAXFP8_HD constexpr bool UsesWgmma(int row_fragments) { return row_fragments >= 4; }

// Activations of e4m3 have at most so many rows, and are multiplied as float16.
inline constexpr int64_t kMaxFloat8Rows = 16;

// Whether one product alone has an instance of the kernel. Arguments found by an index cost
// registers. Tiles of 32 rows and more have none left: an own instance is 1.03x to 1.07x faster on
// an H100. With up to 16 rows both are as fast.
JAXFP8_HD constexpr bool HasOwnInstance(int row_fragments) { return row_fragments >= 4; }

JAXFP8_HD constexpr int ActivationBytes(int row_fragments) {
  return row_fragments * 8 * kActivationChunks * 16;
}
JAXFP8_HD constexpr int StageBytes(int row_fragments) {
  return kWeightBytes + ActivationBytes(row_fragments);
}
// Room for the stages. At the end the sums of the tile overwrite them.
//   fine  whether a stage has fine scales
JAXFP8_HD constexpr int SharedBytes(int row_fragments, bool fine = false) {
  if (fine) return kFineStages * (StageBytes(row_fragments) + kFineScaleBytes);
  return StagesFor(row_fragments) * StageBytes(row_fragments);
}

// An output tile, in tiles along each axis.
struct OutputTile {
  int32_t batch, column_tile, row_tile;
};

// The most products in one launch: their arguments must fit 4 KiB.
inline constexpr int kMaxParts = 4;

// The output tiles of the products of a launch follow each other.
//
//   product       0             1         2
//   output tile   0 1 ... 31    32 ... 39  40 ... 47     blockIdx.x
struct PartTiles {
  int32_t first[kMaxParts] = {};  // of each product; INT32_MAX for absent ones

  JAXFP8_HD int PartOf(int32_t output_tile) const {
    int part = 0;
    for (int i = 1; i < kMaxParts; ++i) part += output_tile >= first[i];
    return part;
  }
};

// A gated launch multiplies the outputs of two products: y = cast(cast(y0) * cast(y1)). The CTAs
// of both for an output tile are one cluster, those of the first product in front. With split = 3:
//
//   product       0 0 0 1 1 1
//   rank          0 1 2 0 1 2           blockIdx.y
struct Gate {
  DType rounded[2] = {DType::kNone, DType::kNone};  // the types of y0 and y1; kNone without a gate

  JAXFP8_HD explicit operator bool() const { return rounded[0] != DType::kNone; }
};

// 32 bits, because a CTA divides a few times before its first load and 64-bit divisions are slow.
struct SplitKSchedule {
  int32_t column_tiles = 1, row_tiles = 1, depth_tiles = 1;
  int32_t output_tiles = 1;
  int32_t split = 1;  // CTAs for one output tile

  // Row tiles are numbered fastest: output tiles of the same weights run together and find them in
  // L2.
  JAXFP8_HD OutputTile CoordOf(int32_t output_tile) const {
    if (row_tiles == 1 && output_tile < column_tiles) return {0, output_tile, 0};
    const int32_t columns = output_tile / row_tiles, batches = columns / column_tiles;
    return {batches, columns - batches * column_tiles, output_tile - columns * row_tiles};
  }
};

// Whether scales change every 32 or 64 of K, within a tile of it (fine_scales.cuh).
bool HasFineScales(const Problem& problem);

// The rows of the smallest tile with room for all rows of the problem, or of the largest tile; in
// units of 8: 1, 2, 4 or 8. With groups it has room for most of them.
int RowFragmentsFor(const Problem& problem);

// The output tiles of the whole problem; with groups, the most that there can be.
int64_t OutputTiles(const Problem& problem);

// The outer axis of a batch with jumps (problem.h), 1 without.
int64_t OuterBatch(const Problem& problem);

// Bytes of one rank's sums of an output tile in the workspace.
size_t PartialTileBytes(const Problem& problem);

// The most CTAs for one output tile: the size of a cluster on every device with clusters.
inline constexpr int kMaxSplit = 8;

// The output tiles computed at a time, by the number of CTAs for each; 0 if the device cannot run
// that many.
struct Capacity {
  int64_t multiprocessors = 1;
  int64_t tiles[kMaxSplit + 1] = {};  // the first is not used
  bool in_waves = false;              // whether further tiles may follow
};

SplitKSchedule MakeSchedule(const Problem& problem, const Capacity& capacity);

// The capacity without clusters. `workspace` is the room for sums in bytes.
//   ctas_per_sm  CTAs on a multiprocessor at a time
Capacity CapacityOf(const Problem& problem, int64_t multiprocessors, int64_t ctas_per_sm,
                    size_t workspace);

// The joint problem of one launch, with all output tiles. The problems need one batch, rows, depth
// and tile size (`WhyNotJoint`).
Problem JointProblem(std::span<const Problem> problems);
// The output tiles of each problem, and their place among all.
PartTiles PartTilesOf(std::span<const Problem> problems);
// The schedule of one of the problems, given the joint one.
SplitKSchedule PartSchedule(const Problem& problem, const SplitKSchedule& joint);

// Why one launch cannot compute the problems, each with the weights as rhs.
Status WhyNotJoint(std::span<const Problem> problems, const Device& device);
// Why one launch cannot compute them, or multiply their outputs if there is a gate.
Status WhyNotGated(std::span<const Problem> problems, const Gate& gate, const Device& device);

// No zero points, amax, out_scale or 8-bit output.
bool HasPlainEpilogue(const Problem& problem);

// Why the kernel cannot compute the problem, whose rhs is the weights.
// `WhyNotForm` asks about the problem alone, `WhyNotProblem` about the device too.
Status WhyNotForm(const Problem& problem);
Status WhyNotProblem(const Problem& problem, const Device& device);

// Bytes of workspace, for devices without clusters. For up to 64 rows it is at most a tenth of the
// weights' bytes.
size_t BestWorkspace(const Problem& problem);

// Whether the weights are the left side, and the problem with them on the right. Of two 8-bit sides
// the one with more lines is the weights.
bool HasWeightsOnLeft(const Problem& problem);
Problem WithWeightsOnRight(const Problem& problem);

// `WhyNotProblem`, whichever side is the 8-bit one.
Status WhyNotEither(const Problem& problem, const Device& device);

}  // namespace jaxfp8::cuda::w8a16
