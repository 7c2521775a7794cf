// The shape of a block of `sm90_gemm`: its threads, and what lies where in its shared memory.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_LAYOUT_H_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_LAYOUT_H_

#include <algorithm>
#include <cstdint>

#include "common/platform.h"
#include "cuda/kernels/sm90_gemm/schedule.h"

namespace jaxfp8::cuda::sm90 {

// When sums are scaled: FP8 every 128 of K or once, others once. A row of lhs always has its own
// scale.
enum class Scaling : uint8_t {
  kBlocks,   // every 128 of K; 128 columns of rhs, or more, share a scale
  kLines,    // every 128 of K; every column has one
  kAfter,    // after the sum over all of K; every column has one, of int8 with a zero point
  kWeights,  // the same without zero points, where lhs has 8 bits and rhs 16
};

inline constexpr int kGroupThreads = 128;  // of a warpgroup, the threads that issue a wgmma
inline constexpr int kWaveRows = 64;       // rows of one wgmma
inline constexpr int kScaleThreads = 64;   // of the loading warpgroup
// A warp's rows of a wave, and how many bytes of them it stages for the epilogue at a time.
inline constexpr int kWarpRows = 16, kStagedBytes = 128;
// From row to row, in bytes. The padding spreads rows over the banks: for stores of 16 bytes of
// eight rows, and of 32 bytes of four rows.
inline constexpr int kNarrowPitch = kStagedBytes + 16, kWidePitch = kStagedBytes + 32;
// A warpgroup stores boxes of a wave x 64 columns of 16 bits (TMA). Where tiles are stored
// transposed it has four of a tile, and stages three without waiting; else it stages all.
inline constexpr int kBoxColumns = 64, kBoxBytes = kBoxColumns * kStagedBytes;
inline constexpr int kTransposedBuffers = 3;
// Bytes in which a math warp keeps what it knows of its tile (groups.cuh).
inline constexpr int kKeptBytes = 32;
inline constexpr int kMaxSharedBytes = 227 << 10;
inline constexpr int kMaxStages = 16;
inline constexpr int kTileAlignment = 1024;         // of swizzled tiles
inline constexpr int kChunkSteps = 4;               // whose scales are loaded together
inline constexpr int kLineBytes = 4 * kChunkSteps;  // from line to line of such a chunk
inline constexpr int kLineFields = 4;  // of a line, where sums are scaled after all of K

// What follows from the shape of a tile.
template <int kRows, int kColumns, Scaling kScaling>
struct BlockLayout {
  static constexpr int kMathGroups = kRows >= 2 * kWaveRows ? 2 : 1;
  static constexpr int kWaves = kRows / kWaveRows / kMathGroups;  // of a warpgroup
  static constexpr int kThreads = (1 + kMathGroups) * kGroupThreads;
  static constexpr int kTileRows = kRows, kTileColumns = kColumns;
  static constexpr bool kMixed = kScaling == Scaling::kWeights;
  static constexpr bool kScalesAfter = kMixed || kScaling == Scaling::kAfter;
  // Columns that share a scale of rhs. Parts of the tile do not cross a multiple of 128.
  static constexpr int kScaleColumns = kScaling != Scaling::kBlocks ? 1
                                       : kColumns % 128 == 0        ? 128
                                                                    : std::min(kColumns, 64);

  // Bytes of a line of a stage: 128 of K in 8 bits, or 64 in 8 and in 16 bits.
  static constexpr int kLhsLine = kMixed ? kMixedDepth : kStepDepth, kRhsLine = kStepDepth;
  static constexpr int kLhsBytes = kRows * kLhsLine, kRhsBytes = kColumns * kRhsLine;
  static constexpr int kRhsScales = kColumns / kScaleColumns;
  // A chunk has the scales of four steps, or what follows the sums of a tile. A small tile is done
  // with one soon.
  static constexpr int kChunks = kScalesAfter || kWaves == 2 ? 2 : 3;
  // A stage is full when its scales are there, too, so that math warps wait once a step. With one
  // warpgroup few rows are multiplied, and what is loaded must not wait for anything.
  static constexpr bool kStageHasScales = !kScalesAfter && kMathGroups == 2;
  static constexpr int kParts = kScaleColumns > 1 ? kRhsScales : 1;
  static constexpr int kChunkFields = kMixed ? 1 : kScalesAfter ? kLineFields : kChunkSteps;
  static constexpr int kChunkBytes = 4 * kChunkFields * (kRows + kRhsScales);
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  // Boxes of a warpgroup's part of a tile, all of which are staged at a time. Large tiles have a
  // stage less for them. Tiles of 256 x 128 whose sums are scaled once have none: on an H100 they
  // were 10 % slower with boxes.
  static constexpr bool kHasBoxes =
      !kMixed && kColumns >= kBoxColumns && (!kScalesAfter || kWaves == 1);
  static constexpr int kBoxes = kHasBoxes ? kWaves * kColumns / kBoxColumns : 0;
  static constexpr int kPaddedBytes =
      (kWarpRows * kWidePitch + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  static constexpr int kStagingBytes =  // of a warp
      kMixed        ? kTransposedBuffers * kBoxBytes / 4
      : kBoxes == 0 ? kWarpRows * kWidePitch
                    : std::max(kBoxes * kBoxBytes / 4, kPaddedBytes);
  static constexpr int kStageBarriers = kMixed ? 2 : 3;
  static constexpr int kMaxBarriers = kStageBarriers * kMaxStages + 2 * kChunks;
  static constexpr int kMathWarps = 4 * kMathGroups;
  static constexpr int kFixedBytes = kTileAlignment + kMathWarps * (kStagingBytes + kKeptBytes) +
                                     kChunks * kChunkBytes + 8 * kMaxBarriers;
  static constexpr int kStages =
      std::min(kMaxStages, (kMaxSharedBytes - kFixedBytes) / kStageBytes);
  static_assert(kStages >= 3);

  static constexpr int kLhsAt = 0;
  static constexpr int kRhsAt = kLhsAt + kStages * kLhsBytes;
  static constexpr int kStagingAt = kRhsAt + kStages * kRhsBytes;
  static_assert(kStagingAt % kTileAlignment == 0);
  static constexpr int kScalesAt = kStagingAt + kMathWarps * kStagingBytes;
  static constexpr int kKeptAt = kScalesAt + kChunks * kChunkBytes;
  static_assert(kScalesAt % 16 == 0 && kKeptAt % 16 == 0);
  static constexpr int kFullAt = kKeptAt + kMathWarps * kKeptBytes;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kLandedAt = kEmptyAt + 8 * kStages;
  static constexpr int kChunkFullAt = kFullAt + 8 * kStageBarriers * kStages;
  static constexpr int kChunkEmptyAt = kChunkFullAt + 8 * kChunks;
  static constexpr int kSharedBytes = kChunkEmptyAt + 8 * kChunks + kTileAlignment;
};

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_LAYOUT_H_
