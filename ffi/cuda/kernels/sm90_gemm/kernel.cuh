// A persistent, warp-specialised GEMM for sm_90a: out [M, N] = epilogue(lhs [M, K] * rhs [N, K]^T).
//
//   CTA, one on each multiprocessor
//     warpgroup 0   loads: warp 0 the tiles (TMA), warps 2 and 3 the scales      load.cuh
//                   warp 1 sets values of other groups to zero                   load.cuh
//     warpgroup 1   multiplies the upper half of the tile's rows, scales and     multiply.cuh, or
//                   stores it                                                    sum.cuh
//     warpgroup 2   the same for the lower half; not there for tiles of 64 rows  store.cuh
//
// Rows of lhs may come in groups, each with an rhs of its own, and the contracted axis in groups,
// each with an output of its own (groups.h).
//
//   barriers in shared memory, one for each stage of the ring of tiles, and chunk of the scales
//     full     completes when the data are there, of a stage its scales, too
//     empty    completes when every consumer warp has read them; for tiles, those of the pair
//     landed   completes when a tile is there that is masked before it is full
//
// Loading runs ahead through the ring, across the end of a tile, so the next tile's first stages
// arrive during the epilogue. A warpgroup that is done with its half goes on to its next tile.

#pragma once

#include <iterator>
#include <utility>

#include "cuda/kernels/sm90_gemm/kernels.h"
#include "cuda/kernels/sm90_gemm/load.cuh"
#include "cuda/kernels/sm90_gemm/multiply.cuh"
#include "cuda/kernels/sm90_gemm/store.cuh"
#include "cuda/kernels/sm90_gemm/sum.cuh"

namespace jaxfp8::cuda::sm90 {

// Multiplies and stores the tiles of a consumer warpgroup.
template <typename L, DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void MultiplyTiles(const Arguments& a, const CUtensorMap* out,
                                              uint32_t shared, Parts<false> parts, uint32_t rank,
                                              uint32_t ctas) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32 - kWarpgroupThreads / 32;
  const uint32_t kept = shared + L::kKeptAt + warp * kKeptBytes;
  Ring<L::kStages> ring;
  Ring<L::kChunks> chunk;
  GroupCursor cursor;
  Part part;
#pragma unroll 1
  while (parts.Next(a.schedule, part)) {
    TileBounds tile;
    bool found = true;
    if (HasGroups(a)) {
      found = FindTile<L>(a, part, static_cast<int32_t>(rank), cursor, tile);
      KeepTile(kept, tile, cursor);
    }
    // Votes, since the compiler takes what was loaded for different from lane to lane, and would
    // have no uniform registers for the main loop.
    if (!__any_sync(~0u, found)) break;
    const int32_t steps = __reduce_max_sync(~0u, tile.sums ? part.end - part.first : 0);
    float total[L::kWgmmas][kColumns / 2];
    if constexpr (L::kScalesAfter) {
      SumThenScale<L, kLhs, kRhs, kColumns>(a, total, shared, steps, ctas, ring, chunk);
    } else {
      MultiplyScaled<L, kLhs, kRhs, kColumns>(total, shared, steps, ctas, ring, chunk);
    }
    if (HasGroups(a)) {
      RecallTile(kept, tile, cursor);
    } else {
      tile = BoundsOf<L>(a, part.unit, static_cast<int32_t>(rank));
    }
    const int32_t warpgroup = warp / 4, row = tile.row + warpgroup * L::kWgmmas * kWgmmaRows;
    const uint32_t staging = shared + L::kStagingAt + warpgroup * 4 * L::kStagingBytes;
    const WarpTile of_warpgroup{tile.batch, row, tile.column, tile.end};
    StoreTile<L, kColumns>(a, out, of_warpgroup, staging, warpgroup, total);
  }
  WaitForStores<0>();  // they read shared memory
}

// The kernel.
//   kRows, kColumns  of an output tile
template <DType kLhs, DType kRhs, Scaling kScaling, int kRows, int kColumns>
__global__ void __launch_bounds__(GemmLayout<kRows, kColumns, kScaling>::kThreads, 1)
    Sm90Gemm(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap lhs,
             const __grid_constant__ CUtensorMap rhs, const __grid_constant__ CUtensorMap out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = GemmLayout<kRows, kColumns, kScaling>;
  extern __shared__ uint8_t shared_memory[];
  const uint32_t shared = FirstTile(shared_memory);
  const uint32_t ctas = CtasInCluster(), rank = CtaInCluster();
  InitBarriers<L>(shared, ctas);
  SynchronizeCluster();
  const Parts<false> parts(a.schedule, static_cast<int32_t>(blockIdx.x / ctas),
                           static_cast<int32_t>(gridDim.x / ctas));
  constexpr bool kMovesRegisters = L::kConsumerWarpgroups == 2;
  const int32_t warp = __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (warp < kWarpgroupThreads / 32) {
    if constexpr (kMovesRegisters) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    }
    if (warp == 0 && IsElected()) {
      PrefetchMap(&lhs), PrefetchMap(&rhs);
      if (a.stores_boxes) PrefetchMap(&out);
      LoadTiles<L>(a, &lhs, &rhs, shared, parts, rank);
    }
    if (warp == 1 && IsContracted(a)) MaskTiles<L>(a, shared, parts, rank);
    if (warp >= 2) {
      const int32_t thread = static_cast<int32_t>(threadIdx.x) - 64;
      if constexpr (L::kScalesAfter) {
        LoadLines<L>(a, shared, parts, rank, thread);
      } else {
        LoadScales<L>(a, shared, parts, rank, thread);
      }
    }
  } else {
    if constexpr (kMovesRegisters) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    }
    MultiplyTiles<L, kLhs, kRhs, kColumns>(a, &out, shared, parts, rank, ctas);
  }
  // A CTA may be written to, and its barriers arrived at, until the other one is done.
  __syncwarp();
  SynchronizeCluster();
#endif
}

template <DType kLhs, DType kRhs, Scaling kScaling, int kRows, int kColumns>
Kernel KernelOf() {
  using L = GemmLayout<kRows, kColumns, kScaling>;
  return {Sm90Gemm<kLhs, kRhs, kScaling, kRows, kColumns>, L::kThreads, L::kSharedBytes,
          L::kHasBoxes};
}

// The kernels of a pair of types, by tile shape.

template <const auto& kTiles, DType kLhs, DType kRhs, Scaling kScaling, int... kShapes>
Kernel KernelOfShape(TileShape tile, std::integer_sequence<int, kShapes...>) {
  Kernel kernel;
  (void)((tile == kTiles[kShapes] &&
          (kernel = KernelOf<kLhs, kRhs, kScaling, kTiles[kShapes].rows, kTiles[kShapes].columns>(),
           true)) ||
         ...);
  return kernel;
}

template <DType kLhs, DType kRhs>
Kernel KernelFor(Scaling scaling, TileShape tile) {
  constexpr auto kAll = std::make_integer_sequence<int, std::size(kTileShapes)>{};
  if (scaling == Scaling::kBlocks) {
    return KernelOfShape<kTileShapes, kLhs, kRhs, Scaling::kBlocks>(tile, kAll);
  }
  return KernelOfShape<kTileShapes, kLhs, kRhs, Scaling::kLines>(tile, kAll);
}

template <DType kLhs, DType kRhs>
Kernel SumKernelFor(TileShape tile) {
  constexpr auto kAll = std::make_integer_sequence<int, std::size(kSumTileShapes)>{};
  return KernelOfShape<kSumTileShapes, kLhs, kRhs, Scaling::kAfter>(tile, kAll);
}

}  // namespace jaxfp8::cuda::sm90
