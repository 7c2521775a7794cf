// Sums of `sm80_w8a16` whose scales change every 32 of K, or 64 (fine_scales.cuh).
//
//   wgmma, half a stage      two fragments of columns, m, and two blocks of 32
//
//     decode    0 | 1 .................. |
//     multiply    | m0 m1 of 0 | m0 of 1 | m1 of 1 |       each a group of instructions
//     scale                    | m0 of 0 | m1 of 0 | m0 of 1 | m1 of 1

#pragma once

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/fine_scales.cuh"
#include "cuda/kernels/sm80_w8a16/pipeline.cuh"
#include "cuda/kernels/sm80_w8a16/stage.cuh"

namespace jaxfp8::cuda::w8a16 {

// Begins the products of 32 of K for a fragment of columns.
template <DType kWide, int kRowFragments>
__device__ __forceinline__ void BeginBlock(const TwoSteps& fragments, int m, uint32_t activations,
                                           float (&acc)[kRowFragments][4]) {
  WgmmaFence();
  Wgmma<kWide, kRowFragments, false>(acc, fragments[0][m], SwizzledMatrixDescriptor(activations));
  Wgmma<kWide, kRowFragments>(acc, fragments[1][m], SwizzledMatrixDescriptor(activations + 32));
  WgmmaCommit();
}

// scaled_acc += the products of a stage, by wgmma.
template <class D, DType kWide, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void MultiplyFineStageWgmma(const Arguments& a, const uint8_t* weights,
                                                       const uint8_t* activations,
                                                       const ColumnFactors& params,
                                                       Accumulators<kRowFragments>& scaled_acc) {
  const uint8_t* slots = activations + ActivationBytes(kRowFragments);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t from = SharedAddress(activations) + half * 8 * kRowFragments * 128;
    const Codes codes = LoadCodes<kMnMajor, Order::kWgmma>(weights, threadIdx.x, half);
    const FineScales<kMnMajor> scales(slots, half);
    const bool special = WarpHasSpecials<D>(codes);
    Accumulators<kRowFragments> acc;
    TwoSteps fragments[2];
    DecodeBlock<D, kMnMajor>(a, codes, special, 0, params, fragments[0]);
    BeginBlock<kWide>(fragments[0], 0, from, acc.values[0]);
    BeginBlock<kWide>(fragments[0], 1, from, acc.values[1]);
    DecodeBlock<D, kMnMajor>(a, codes, special, 1, params, fragments[1]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      WgmmaWait<1>();
      scales.Add(0, m, D::kFactor, acc.values[m], scaled_acc.values[m]);
      BeginBlock<kWide>(fragments[1], m, from + 64, acc.values[m]);
    }
    WgmmaWait<1>();
    scales.Add(1, 0, D::kFactor, acc.values[0], scaled_acc.values[0]);
    WgmmaWait<0>();
    scales.Add(1, 1, D::kFactor, acc.values[1], scaled_acc.values[1]);
  }
}

// The scaled accumulators of a block's part of K.
template <class D, DType kActivation, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void AccumulateFine(const Arguments& a, const BlockTile& tile,
                                               uint8_t* stages,
                                               Accumulators<kRowFragments>& scaled_acc) {
  constexpr bool kWgmma = kHasWgmma && UsesWgmma(kRowFragments);
  using Scales = FineScales<kMnMajor>;
  constexpr Order kOrder = kWgmma ? Order::kWgmma : Scales::kOrder;
  Pipeline<kActivation, kMnMajor, kRowFragments, kOrder, true> pipeline(a, tile, blockIdx.y,
                                                                        stages);
  ColumnFactors params = {};
  if constexpr (D::kInteger) {
#pragma unroll
    for (uint32_t& addend : params.zero_addend) addend = D::ZeroPointAddend(a.weight, 0);
  }
#pragma unroll 1
  for (int32_t depth_tile = blockIdx.y; depth_tile < a.schedule.depth_tiles;
       depth_tile += a.schedule.split) {
    const uint8_t* weights = pipeline.Next();
    const uint8_t* activations = weights + kWeightBytes;
    if constexpr (kWgmma) {
      MultiplyFineStageWgmma<D, kActivation, kMnMajor>(a, weights, activations, params, scaled_acc);
    } else {
      MultiplyStage<D, kActivation, kMnMajor, Scales>(a, weights, activations, params, scaled_acc);
    }
  }
}

}  // namespace jaxfp8::cuda::w8a16
