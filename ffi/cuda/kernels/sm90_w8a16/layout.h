// The shape of a CTA of the W8A16 kernel: its threads, and what lies where in its shared memory.

#pragma once

#include <algorithm>

#include "cuda/kernels/sm90/block.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda::sm90 {

// A warpgroup has four boxes of a tile, and stages three of them without waiting.
inline constexpr int kTransposedBuffers = 3;

// What follows from the shape of a tile.
template <int kRows, int kColumns>
struct W8A16Layout {
  static constexpr int kConsumerWarpgroups = kRows >= 2 * kWgmmaRows ? 2 : 1;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
  static constexpr int kWgmmas = kRows / kWgmmaRows / kConsumerWarpgroups;  // of a warpgroup
  static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
  static constexpr int kTileRows = kRows, kTileColumns = kColumns;
  static constexpr bool kTransposed = true;
  static constexpr TileShape kOutputTile{kColumns, kRows};

  // Bytes of a line of a stage: 64 of K, in 8 and in 16 bits.
  static constexpr int kLhsLine = kMixedDepth, kRhsLine = 2 * kMixedDepth;
  static constexpr int kLhsBytes = kRows * kLhsLine, kRhsBytes = kColumns * kRhsLine;
  static constexpr int kChunks = 2, kChunkBytes = 4 * (kRows + kColumns);
  static constexpr int kStagingBytes = kTransposedBuffers * kBoxBytes / 4;  // of a warp
  static constexpr int kFixedBytes = kTileAlignment +
                                     kConsumerWarps * (kStagingBytes + kKeptBytes) +
                                     kChunks * kChunkBytes + 8 * 2 * (kMaxStages + kChunks);
  static constexpr int kStages =
      std::min(kMaxStages, (kMaxSharedBytes - kFixedBytes) / (kLhsBytes + kRhsBytes));
  static_assert(kStages >= 3);

  static constexpr int kLhsAt = 0;
  static constexpr int kRhsAt = kLhsAt + kStages * kLhsBytes;
  static constexpr int kStagingAt = kRhsAt + kStages * kRhsBytes;
  static_assert(kStagingAt % kTileAlignment == 0);
  static constexpr int kScalesAt = kStagingAt + kConsumerWarps * kStagingBytes;
  static constexpr int kKeptAt = kScalesAt + kChunks * kChunkBytes;
  static constexpr int kFullAt = kKeptAt + kConsumerWarps * kKeptBytes;
  static_assert(kScalesAt % 16 == 0 && kKeptAt % 16 == 0);
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kChunkFullAt = kEmptyAt + 8 * kStages;
  static constexpr int kChunkEmptyAt = kChunkFullAt + 8 * kChunks;
  static constexpr int kSharedBytes = kChunkEmptyAt + 8 * kChunks + kTileAlignment;
};

}  // namespace jaxfp8::cuda::sm90
