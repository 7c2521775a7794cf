// The shape of a CTA of `sm90_gemm`: its threads, and what lies where in its shared memory.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/platform.h"
#include "cuda/kernels/sm90/block.h"
#include "cuda/kernels/sm90_gemm/schedule.h"

namespace jaxfp8::cuda::sm90 {

// When sums are scaled: FP8 every 128 of K or once, others once. A row of lhs always has its own
// scale.
enum class Scaling : uint8_t {
  kBlocks,  // every 128 of K; 128 columns of rhs, or more, share a scale
  kLines,   // every 128 of K; every column has one
  kAfter,   // after the sum over all of K; every column has one, of int8 with a zero point
};

inline constexpr int kChunkSteps = 4;               // whose scales are loaded together
inline constexpr int kLineBytes = 4 * kChunkSteps;  // from line to line of such a chunk
inline constexpr int kLineFields = 4;  // of a line, where sums are scaled after all of K

// What follows from the shape of a tile.
template <int kRows, int kColumns, Scaling kScaling>
struct GemmLayout {
  static constexpr int kConsumerWarpgroups = kRows >= 2 * kWgmmaRows ? 2 : 1;
  static constexpr int kWgmmas = kRows / kWgmmaRows / kConsumerWarpgroups;  // of a warpgroup
  static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
  static constexpr int kTileRows = kRows, kTileColumns = kColumns;
  static constexpr bool kTransposed = false;  // tiles are those of the output
  static constexpr TileShape kOutputTile{kRows, kColumns};
  static constexpr bool kScalesAfter = kScaling == Scaling::kAfter;
  // Columns that share a scale of rhs. Parts of the tile do not cross a multiple of 128.
  static constexpr int kScaleColumns = kScaling != Scaling::kBlocks ? 1
                                       : kColumns % 128 == 0        ? 128
                                                                    : std::min(kColumns, 64);

  // Of a stage, which has 128 of K.
  static constexpr int kLhsBytes = kRows * kStepDepth, kRhsBytes = kColumns * kStepDepth;
  static constexpr int kRhsScales = kColumns / kScaleColumns;
  // A chunk has the scales of four steps, or what follows the sums of a tile. A small tile is done
  // with one soon.
  static constexpr int kChunks = kScalesAfter || kWgmmas == 2 ? 2 : 3;
  // A stage is full when its scales are there, too, so that consumer warps wait once a step. With
  // one warpgroup few rows are multiplied, and what is loaded must not wait for anything.
  static constexpr bool kStageHasScales = !kScalesAfter && kConsumerWarpgroups == 2;
  static constexpr int kParts = kScaleColumns > 1 ? kRhsScales : 1;
  static constexpr int kChunkFields = kScalesAfter ? kLineFields : kChunkSteps;
  static constexpr int kChunkBytes = 4 * kChunkFields * (kRows + kRhsScales);
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  // Boxes of a warpgroup's part of a tile, all of which are staged at a time. Large tiles have a
  // stage less for them. Tiles of 256 x 128 whose sums are scaled once have none: on an H100 they
  // were 10 % slower with boxes.
  static constexpr bool kHasBoxes = kColumns >= kBoxColumns && (!kScalesAfter || kWgmmas == 1);
  static constexpr int kBoxes = kHasBoxes ? kWgmmas * kColumns / kBoxColumns : 0;
  static constexpr int kPaddedBytes =
      (kWarpRows * kWidePitch + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  static constexpr int kStagingBytes =  // of a warp
      kBoxes == 0 ? kWarpRows * kWidePitch : std::max(kBoxes * kBoxBytes / 4, kPaddedBytes);
  static constexpr int kStageBarriers = 3;
  static constexpr int kMaxBarriers = kStageBarriers * kMaxStages + 2 * kChunks;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
  static constexpr int kFixedBytes = kTileAlignment +
                                     kConsumerWarps * (kStagingBytes + kKeptBytes) +
                                     kChunks * kChunkBytes + 8 * kMaxBarriers;
  static constexpr int kStages =
      std::min(kMaxStages, (kMaxSharedBytes - kFixedBytes) / kStageBytes);
  static_assert(kStages >= 3);

  static constexpr int kLhsAt = 0;
  static constexpr int kRhsAt = kLhsAt + kStages * kLhsBytes;
  static constexpr int kStagingAt = kRhsAt + kStages * kRhsBytes;
  static_assert(kStagingAt % kTileAlignment == 0);
  static constexpr int kScalesAt = kStagingAt + kConsumerWarps * kStagingBytes;
  static constexpr int kKeptAt = kScalesAt + kChunks * kChunkBytes;
  static_assert(kScalesAt % 16 == 0 && kKeptAt % 16 == 0);
  static constexpr int kFullAt = kKeptAt + kConsumerWarps * kKeptBytes;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kLandedAt = kEmptyAt + 8 * kStages;
  static constexpr int kChunkFullAt = kFullAt + 8 * kStageBarriers * kStages;
  static constexpr int kChunkEmptyAt = kChunkFullAt + 8 * kChunks;
  static constexpr int kSharedBytes = kChunkEmptyAt + 8 * kChunks + kTileAlignment;
};

}  // namespace jaxfp8::cuda::sm90
