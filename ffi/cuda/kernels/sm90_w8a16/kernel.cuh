// W8A16 on Hopper, persistent and warp-specialised: 8-bit weights times 16-bit values.
//
//   out^T [N, M] = epilogue(weights [N, K] * values [M, K]^T)     weights also as [K, N]
//
// The weights are lhs, whichever side they are of the problem, because wgmma takes lhs alone from
// registers, where they are decoded. So a tile is of the transposed output.
//
//   CTA, one on each multiprocessor
//     warpgroup 0    the producer: warp 0 loads tiles (TMA), warps 2 and 3 scales    load.cuh
//     warpgroup 1    a consumer: it decodes the upper half of the tile's weights, weight_codes.cuh
//                    multiplies them,                                                multiply.cuh
//                    and stores the tile transposed store_transposed.cuh
//     warpgroup 2    the same for the lower half
//
//   in registers of a consumer   accumulators of 64 x N a wave, fragments of weights, and power,
//                                zero point and factor of each of its rows weight_rows.cuh
//
//   barriers in shared memory, one for each stage of the ring of tiles, and chunk of the scales
//     full     completes when the data are there
//     empty    completes when every consumer warp has read them; for tiles, those of the pair
//
// CTAs may share a tile, each with some of its steps (shared_units.cuh).

#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/kernels/sm90/block.h"
#include "cuda/kernels/sm90_w8a16/kernels.h"
#include "cuda/kernels/sm90_w8a16/load.cuh"
#include "cuda/kernels/sm90_w8a16/multiply.cuh"
#include "cuda/kernels/sm90_w8a16/schedule.h"
#include "cuda/kernels/sm90_w8a16/store_transposed.cuh"

namespace jaxfp8::cuda::sm90 {

// The shape of a CTA of the W8A16 kernel: its threads, and what lies where in its shared memory.

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

// Multiplies and stores the tiles of a consumer warpgroup.
template <typename L, DType kWeight, DType kWide>
__device__ __forceinline__ void MultiplyTiles(const Arguments& a, const CUtensorMap* out,
                                              uint32_t shared, Parts<true> parts, uint32_t rank,
                                              uint32_t ctas) {
  constexpr int kColumns = L::kTileColumns;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32 - kWarpgroupThreads / 32;
  const uint32_t kept = shared + L::kKeptAt + warp * kKeptBytes;
  Ring<L::kStages> ring;
  Ring<L::kChunks> chunk;
  ScaleBlockTurns(a.weights, __shfl_sync(~0u, warp / 4, 0)).Begin();
  GroupCursor cursor;
  Part part;
#pragma unroll 1
  while (parts.Next(a.schedule, part)) {
    TileBounds tile;
    const bool found = TileOfPart<L>(a, part, static_cast<int32_t>(rank), cursor, tile);
    // Votes keep what was loaded in uniform registers, as in `sm90_gemm`.
    if (!__any_sync(~0u, found)) break;
    KeepTile(kept, tile, cursor);
    float total[L::kWgmmas][kColumns / 2];
    if (__any_sync(~0u, tile.sums)) {
      if (!SumWeights<L, kWeight, kWide, kColumns>(a, part, tile, kept, total, shared, ctas, ring,
                                                   chunk)) {
        continue;
      }
    } else {
      Clear(total);
    }
    RecallTile(kept, tile, cursor);
    const int32_t warpgroup = warp / 4;
    const int32_t column = tile.column + warpgroup * L::kWgmmas * kWgmmaRows;
    const uint32_t staging = shared + L::kStagingAt + warpgroup * 4 * L::kStagingBytes;
    StoreTransposed<L, kColumns>(a, out, {tile.batch, tile.row, column, tile.end}, staging,
                                 warpgroup, total);
  }
  WaitForStores<0>();  // they read shared memory
}

// The kernel.
//   kRows, kColumns  of a tile
template <DType kWeight, DType kWide, int kRows, int kColumns>
__global__ void __launch_bounds__(W8A16Layout<kRows, kColumns>::kThreads, 1)
    Sm90W8A16(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap lhs,
              const __grid_constant__ CUtensorMap rhs, const __grid_constant__ CUtensorMap out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = W8A16Layout<kRows, kColumns>;
  extern __shared__ uint8_t shared_memory[];
  const uint32_t shared = FirstTile(shared_memory);
  const uint32_t ctas = CtasInCluster(), rank = CtaInCluster();
  InitBarriers<L>(shared, ctas);
  SynchronizeCluster();
  const Parts<true> parts(a.schedule, static_cast<int32_t>(blockIdx.x / ctas),
                          static_cast<int32_t>(gridDim.x / ctas));
  static_assert(L::kConsumerWarpgroups == 2);
  const int32_t warp = __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (warp < kWarpgroupThreads / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (warp == 0 && IsElected()) {
      PrefetchMap(&lhs), PrefetchMap(&rhs);
      if (a.stores_boxes) PrefetchMap(&out);
      LoadTiles<L>(a, &lhs, &rhs, shared, parts, rank);
    }
    if (warp >= 2) {
      LoadLineScales<L>(a, shared, parts, rank, static_cast<int32_t>(threadIdx.x) - 64);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    MultiplyTiles<L, kWeight, kWide>(a, &out, shared, parts, rank, ctas);
  }
  // A CTA may be written to, and its barriers arrived at, until the other one is done.
  __syncwarp();
  SynchronizeCluster();
#endif
}

template <DType kWeight, DType kWide, int... kShapes>
Kernel WeightsKernelOfShape(TileShape tile, std::integer_sequence<int, kShapes...>) {
  Kernel kernel;
  const auto take = [&]<int kRows, int kColumns>(std::integer_sequence<int, kRows, kColumns>) {
    using L = W8A16Layout<kRows, kColumns>;
    kernel = {Sm90W8A16<kWeight, kWide, kRows, kColumns>, L::kThreads, L::kSharedBytes, true};
    return true;
  };
  (void)((tile == kMixedTileShapes[kShapes] &&
          take(std::integer_sequence<int, kMixedTileShapes[kShapes].rows,
                                     kMixedTileShapes[kShapes].columns>{})) ||
         ...);
  return kernel;
}

template <DType kWeight>
Kernel WeightsKernelFor(DType wide, TileShape tile) {
  constexpr auto kAll = std::make_integer_sequence<int, std::size(kMixedTileShapes)>{};
  return wide == DType::kBF16 ? WeightsKernelOfShape<kWeight, DType::kBF16>(tile, kAll)
                              : WeightsKernelOfShape<kWeight, DType::kF16>(tile, kAll);
}

}  // namespace jaxfp8::cuda::sm90
