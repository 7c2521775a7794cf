// 16-bit activations, or few rows of e4m3, times 8-bit weights, on the tensor cores of sm_80 and
// later.
//
// Skinny products are bound by reading the weights. The weights are therefore the 16-row operand of
// the instruction and the activations the 8-column one: a product of one row wastes only idle
// arithmetic.
//
//     out^T [N, M] = weights [N, K] * activations^T [K, M]
//
//   global     weights, 8-bit codes            activations, 16 bits, or e4m3
//              [N, K] or [K, N]                [M, K] or [K, M]
//                 |                               |
//                 |   cp.async by all warps, several stages in flight (pipeline.cuh)
//                 v                               v
//   shared     128 columns x 128 K, codes      8 * kRowFragments rows x 128 K
//                 |                               |  mma.sync: loaded as B fragments, and
//                 |                               |            decoded, if they are e4m3
//                 |  a lane: 4 columns x 16 K     |  wgmma: read by the tensor cores
//                 v  decoded to 16 bits           |
//   registers  A fragments ----> tensor cores <---+   (stage.cuh)
//                                    |
//              acc         float32, 32 columns x 8 * kRowFragments rows a warp
//                                    |  at the end of a scale block (scales.cuh)
//              scaled_acc  float32, the same shape
//                                    |  at the end of the CTA's part of K
//   shared     sums of the tile, which the CTAs of a cluster add up (split_k.cuh)
//                                    |  epilogue
//   global     out
//
// Devices without clusters add the CTAs' sums in a second kernel.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/fine_stage.cuh"
#include "cuda/kernels/sm80_w8a16/pipeline.cuh"
#include "cuda/kernels/sm80_w8a16/scales.cuh"
#include "cuda/kernels/sm80_w8a16/split_k.cuh"
#include "cuda/kernels/sm80_w8a16/stage.cuh"

namespace jaxfp8::cuda::w8a16 {

// Stores the scaled accumulators of an output tile, up to the last row of the output.
//   to, pitch  the first sum of the tile; stride of rows in floats
template <int kRowFragments>
__device__ __forceinline__ void StoreSums(const Accumulators<kRowFragments>& scaled_acc,
                                          int rows_left, float* to, int pitch) {
  const int lane = threadIdx.x % 32, column = ColumnOf(threadIdx.x / 32, lane);
  const auto& values = scaled_acc.values;
#pragma unroll
  for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = RowOf(lane, n) + i;
      if (row >= rows_left) continue;
      *reinterpret_cast<float4*>(to + row * pitch + column) =
          make_float4(values[0][n][i], values[0][n][2 + i], values[1][n][i], values[1][n][2 + i]);
    }
  }
}

// The scaled accumulators of a CTA's part of K.
//   rank  of the CTA among those of its product
template <class D, DType kActivation, bool kMnMajor, int kRowFragments, Launch kLaunch>
__device__ __forceinline__ void Accumulate(const JointArguments& parts, const Arguments& a,
                                           const BlockTile& tile, int32_t rank, uint8_t* stages,
                                           Accumulators<kRowFragments>& scaled_acc) {
  constexpr bool kWgmma = kHasWgmma && UsesWgmma(kRowFragments);
  const int32_t end = a.schedule.depth_tiles, step = a.schedule.split;
  int32_t depth_tile = rank;
  constexpr Order kOrder = kWgmma ? Order::kWgmma : NoScales::kOrder;
  Pipeline<kActivation, kMnMajor, kRowFragments, kOrder> pipeline(a, tile, depth_tile, stages);
  if constexpr (kLaunch == Launch::kGated) {
    FetchEpilogue(parts.of[0]), FetchEpilogue(parts.of[1]);
  }
  const int32_t column =
      tile.column_tile * kTileColumns + ColumnOf(threadIdx.x / 32, threadIdx.x % 32);
  const ScaleOffsets offsets(a, tile.batch, column);
  Accumulators<kRowFragments> acc = {};
#pragma unroll 1
  while (depth_tile < end) {
    const int32_t scale_block = depth_tile / a.depth_tiles_per_scale;
    ColumnFactors params;
    LoadColumnParams<D>(a, offsets, scale_block, params);
    const int32_t block_end = min(end, (scale_block + 1) * a.depth_tiles_per_scale);
#pragma unroll 1
    for (; depth_tile < block_end; depth_tile += step) {
      const uint8_t* weights = pipeline.Next();
      const uint8_t* activations = weights + kWeightBytes;
      if constexpr (kWgmma) {
        MultiplyStageWgmma<D, kActivation, kMnMajor>(a, weights, SharedAddress(activations), params,
                                                     acc);
      } else {
        MultiplyStage<D, kActivation, kMnMajor, NoScales>(a, weights, activations, params, acc);
      }
    }
    ScaleAccumulators(params, a.scale_form, D::kFactor, acc, scaled_acc);
  }
}

JAXFP8_HD constexpr int CtasPerSm(int row_fragments, Launch launch) {
  return launch == Launch::kFine ? FineCtasPerSm(row_fragments) : kCtasPerSm;
}

// The kernel.
//   blockIdx.x     the output tile, of all products
//   blockIdx.y     the rank: its part of K; with a gate the product, then the rank
//   blockIdx.z     the outer index of a batch with jumps (batch.cuh)
//   kWeight        e4m3, e5m2 or int8; uint8 is int8 with the sign bit flipped
//   kActivation    bfloat16, float16, or e4m3 (up to 16 rows, decoded to float16)
//   kMnMajor       weights are [K, N]; else [N, K], K-contiguous
//   kRowFragments  rows of an output tile in units of 8: 1, 2, 4 or 8
//   kLaunch        what it computes. The arguments of one product, or of groups, have a constant
//   place
template <DType kWeight, DType kActivation, bool kMnMajor, int kRowFragments, Launch kLaunch>
__global__ void __launch_bounds__(kThreads, CtasPerSm(kRowFragments, kLaunch))
    Sm80W8A16(const __grid_constant__ JointArguments parts) {
  constexpr int kTileRows = 8 * kRowFragments;
  static_assert(kTileRows * kSumPitch * 4 <= SharedBytes(kRowFragments));
  extern __shared__ __align__(1024) uint8_t stages[];
  constexpr bool kGated = kLaunch == Launch::kGated;
  constexpr bool kFine = kLaunch == Launch::kFine, kSeveral = kLaunch == Launch::kSeveral;
  constexpr bool kJoint = kSeveral || kFine;
  constexpr bool kNeedsClusters = kGated || (kSeveral && HasOwnInstance(kRowFragments));
  if constexpr (kNeedsClusters && !kHasClusters) return;  // not launched
  const int ranks = gridDim.y / 2;                        // of each product, with a gate
  const int behind = kGated && blockIdx.y >= ranks ? 1 : 0;
  const int part = kJoint ? parts.tiles.PartOf(blockIdx.x) : behind;
  const Arguments& a = parts.of[part];
  const int32_t number = kGated ? blockIdx.x : blockIdx.x - parts.tiles.first[part];
  const BlockTile tile = kLaunch == Launch::kGroups ? GroupedTileOfBlock(a, number)
                                                    : TileOfBlock(a, number, kTileRows);
  const int split = a.schedule.split, rows_left = tile.end - tile.row;
  const int first = blockIdx.y * kThreads + threadIdx.x;
  const int step = (kGated ? 2 * split : split) * kThreads;
  if constexpr (kLaunch == Launch::kGroups) {
    if (!tile.sums) return StoreRest(a, tile, kTileRows, first, step);
  }
  Accumulators<kRowFragments> scaled_acc = {};
  using D = Decoder<kWeight, WideOf(kActivation)>;
  const int32_t rank = kGated ? blockIdx.y - behind * ranks : blockIdx.y;
  if constexpr (kFine) {
    AccumulateFine<D, kActivation, kMnMajor>(a, tile, stages, scaled_acc);
  } else {
    Accumulate<D, kActivation, kMnMajor, kRowFragments, kLaunch>(parts, a, tile, rank, stages,
                                                                 scaled_acc);
  }
  if (!kHasClusters && split > 1) {
    const int64_t partial = OutputTileOfBlock() * split + blockIdx.y;
    StoreSums(scaled_acc, rows_left, a.partials + partial * (min(a.rows, kTileRows) * kTileColumns),
              kTileColumns);
    return;
  }
  float* sums = reinterpret_cast<float*>(stages);
  __syncthreads();  // all warps have read the last stage
  StoreSums(scaled_acc, rows_left, sums, kSumPitch);
  if constexpr (kHasClusters) {
    ClusterArrive();
    const ClusterSums of_ranks{SharedAddress(sums)};
    if constexpr (kGated) {
      StoreGatedTile(parts, tile, kTileRows, first, step, of_ranks);
    } else {
      StoreTile(a, tile, kTileRows, first, step, of_ranks);
    }
    if (!kGated && split == 1) return;
    // The others may still read this CTA's sums.
    __syncwarp();
    ClusterArrive();
    ClusterWait();
  } else {
    StoreTile(a, tile, kTileRows, first, step, BlockSums{sums});
  }
}

// The instance for a tile of 8 * row_fragments rows; null if there is none.
template <DType kWeight, DType kActivation, bool kMnMajor, Launch kLaunch>
KernelFunction ForTile(int row_fragments) {
  constexpr auto kOf = [](int fragments) {
    return kLaunch == Launch::kOne && !HasOwnInstance(fragments) ? Launch::kSeveral : kLaunch;
  };
  if (row_fragments == 1) return Sm80W8A16<kWeight, kActivation, kMnMajor, 1, kOf(1)>;
  if (row_fragments == 2) return Sm80W8A16<kWeight, kActivation, kMnMajor, 2, kOf(2)>;
  if constexpr (!IsFloat8(kActivation)) {
    if (row_fragments == 4) return Sm80W8A16<kWeight, kActivation, kMnMajor, 4, kLaunch>;
    if (row_fragments == 8) return Sm80W8A16<kWeight, kActivation, kMnMajor, 8, kLaunch>;
  }
  return nullptr;
}

template <DType kWeight, DType kActivation, Launch kLaunch>
KernelFunction ForLayout(bool mn_major, int row_fragments) {
  return mn_major ? ForTile<kWeight, kActivation, true, kLaunch>(row_fragments)
                  : ForTile<kWeight, kActivation, false, kLaunch>(row_fragments);
}

template <DType kWeight, Launch kLaunch>
KernelFunction KernelFor(DType activation, bool mn_major, int row_fragments) {
  switch (activation) {
    case DType::kBF16:
      return ForLayout<kWeight, DType::kBF16, kLaunch>(mn_major, row_fragments);
    case DType::kF16:
      return ForLayout<kWeight, DType::kF16, kLaunch>(mn_major, row_fragments);
    case DType::kE4M3:
      if constexpr (IsFloat8(kWeight) && kLaunch < Launch::kGroups) {
        return ForLayout<kWeight, DType::kE4M3, kLaunch>(mn_major, row_fragments);
      }
      return nullptr;
    default:
      return nullptr;
  }
}

}  // namespace jaxfp8::cuda::w8a16
