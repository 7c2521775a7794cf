// bfloat16 or float16 activations times 8-bit weights, on the tensor cores of sm_80 and later.
//
// With few rows the time goes to reading the weights. So the weights are the 16-row operand of the
// instruction and the activations the 8-column one, and a product of one row wastes only idle
// arithmetic:
//
//     out^T [N, M] = weights [N, K] * activations^T [K, M]
//
//   global     weights, 8-bit codes            activations, 16 bits
//              [N, K] or [K, N]                [M, K], or packed tiles (pack_activations.cuh)
//                 |                               |
//                 |   cp.async by all 4 warps, several stages in flight (pipeline.cuh, load.cuh)
//                 v                               v
//   shared     128 columns x 128 K, codes      8 * kRowFragments rows x 128 K
//                 |                               |
//                 |  a lane: 4 columns x 16 K     |  mma.sync: loaded as B fragments
//                 v  decoded to 16 bits           v  wgmma: read by the tensor cores
//   registers  A fragments ----> tensor cores <---+   (mma_stage.cuh, wgmma_stage.cuh)
//                                    |
//              acc         float32, 32 columns x 8 * kRowFragments rows a warp
//                                    |  at the end of a scale block (scales.cuh)
//              scaled_acc  float32, the same shape
//                                    |  at the end of the block's share of a tile
//   workspace  a partial tile; the second kernel adds partial tiles up and applies the epilogue
//              (split_k.cuh)

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/mma_stage.cuh"
#include "cuda/kernels/sm80_w8a16/pipeline.cuh"
#include "cuda/kernels/sm80_w8a16/scales.cuh"
#include "cuda/kernels/sm80_w8a16/wgmma_stage.cuh"

namespace jaxfp8::cuda::w8a16 {

// Stores the scaled accumulators of an output tile as a partial tile: kTileColumns float32 for each
// row that exists.
template <int kRowFragments>
__device__ __forceinline__ void StorePartial(const Arguments& a, int32_t output_tile,
                                             const TileCoord& coord,
                                             const Accumulators<kRowFragments>& scaled_acc) {
  const int lane = threadIdx.x % 32, left = a.rows - coord.row_tile * (8 * kRowFragments);
  const int64_t stored_rows = min(a.rows, 8 * kRowFragments);  // of a partial tile
  float* partial = a.partials +
                   a.schedule.PartialOf(blockIdx.x, output_tile) * (stored_rows * kTileColumns) +
                   ColumnOf(threadIdx.x / 32, lane);
  const auto& values = scaled_acc.values;
#pragma unroll
  for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = RowOf(lane, n) + i;
      if (row >= left) continue;
      *reinterpret_cast<float4*>(partial + row * kTileColumns) =
          make_float4(values[0][n][i], values[0][n][2 + i], values[1][n][i], values[1][n][2 + i]);
    }
  }
}

// The kernel. A block runs its share of the schedule's iterations, which may cross output tiles.
//   kWeight        e4m3, e5m2 or int8; uint8 is int8 with the sign bit flipped
//   kWide          type of the activations, bfloat16 or float16
//   kMnMajor       weights are [K, N]; else [N, K], which is K-contiguous
//   kRowFragments  rows of an output tile in units of 8: 1, 2, 4 or 8
template <DType kWeight, DType kWide, bool kMnMajor, int kRowFragments>
__global__ void __launch_bounds__(kThreads, BlocksPerSm(kRowFragments))
    Sm80W8A16(const __grid_constant__ Arguments a) {
  using D = Decoder<kWeight, kWide>;
  constexpr bool kWgmma = kHasWgmma && PacksActivations(kRowFragments);
  extern __shared__ __align__(128) uint8_t stages[];
  LaunchDependentGrids();
  const Schedule& schedule = a.schedule;
  const int32_t begin = schedule.Begin(blockIdx.x);
  const int32_t count = schedule.Begin(blockIdx.x + 1) - begin;
  Iteration iteration(schedule, begin);
  Pipeline<kMnMajor, kRowFragments, kWgmma> pipeline(a, iteration, count, stages);
  int32_t scale_block = iteration.depth_tile / a.depth_tiles_per_scale;
  int32_t left = (scale_block + 1) * a.depth_tiles_per_scale - iteration.depth_tile;  // depth tiles
  ScaleOffsets offsets(a, iteration.coord);
  ColumnParams params;
  LoadColumnParams<D>(a, offsets, scale_block, params);
  Accumulators<kRowFragments> acc = {}, scaled_acc = {};
#pragma unroll 1
  for (int32_t i = 1;; ++i) {
    const uint8_t* stage = pipeline.Next();
    if constexpr (kWgmma) {
      MultiplyStageWgmma<D, kWide, kMnMajor>(a, stage, params, acc);
    } else {
      MultiplyStage<D, kWide, kMnMajor>(a, stage, params, acc);
    }
    const bool last = i == count || iteration.depth_tile + 1 == schedule.depth_tiles;
    if (!last && --left > 0) {
      ++iteration.depth_tile;
      continue;
    }
    ScaleAccumulators(params, D::kFactor, acc, scaled_acc);
    if (last) {
      StorePartial(a, iteration.output_tile, iteration.coord, scaled_acc);
      scaled_acc = {};
      scale_block = -1;
    }
    if (i == count) return;
    iteration.Advance(schedule);
    // With one set of accumulators a scale block is all of K, and the offsets need not be kept.
    if (last || !KeepsScaledAccumulators(kRowFragments)) offsets = ScaleOffsets(a, iteration.coord);
    left = a.depth_tiles_per_scale;
    LoadColumnParams<D>(a, offsets, ++scale_block, params);
  }
}

// The instance for a tile of 8 * row_fragments rows; null if there is none.
template <DType kWeight, DType kWide, bool kMnMajor>
KernelFunction ForRowFragments(int row_fragments) {
  switch (row_fragments) {
    case 1:
      return Sm80W8A16<kWeight, kWide, kMnMajor, 1>;
    case 2:
      return Sm80W8A16<kWeight, kWide, kMnMajor, 2>;
    case 4:
      return Sm80W8A16<kWeight, kWide, kMnMajor, 4>;
    case 8:
      return Sm80W8A16<kWeight, kWide, kMnMajor, 8>;
    default:
      return nullptr;
  }
}

template <DType kWeight>
KernelFunction KernelFor(DType wide, bool mn_major, int row_fragments) {
  if (wide == DType::kBF16) {
    return mn_major ? ForRowFragments<kWeight, DType::kBF16, true>(row_fragments)
                    : ForRowFragments<kWeight, DType::kBF16, false>(row_fragments);
  }
  return mn_major ? ForRowFragments<kWeight, DType::kF16, true>(row_fragments)
                  : ForRowFragments<kWeight, DType::kF16, false>(row_fragments);
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_
