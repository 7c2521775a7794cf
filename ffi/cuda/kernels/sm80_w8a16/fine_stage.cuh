// Multiplies a stage of `sm80_w8a16` whose scales change every 32 of K, or 64.
//
//   K of a stage:  | 32 | 32 | 32 | 32 |     two steps of 16 each
//                  acc = the products of two steps           tensor cores
//                  scaled_acc += acc * scale
//
// So each sum of 32 is exact in float32 before it is scaled, whatever form its scale has. Weights
// and activations lie as wgmma needs them, whose steps are 16 neighbours of K. `mma.sync` reads the
// same activations by words.

#pragma once

#include "cuda/kernels/common/mma.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/fine_scales.cuh"
#include "cuda/kernels/sm80_w8a16/pipeline.cuh"
#include "cuda/kernels/sm80_w8a16/wgmma_stage.cuh"

namespace jaxfp8::cuda::w8a16 {

// The A operands of two steps.
using TwoSteps = uint32_t[2][2][4];

// The weights of 32 of K.
//   pair  of steps, of the two in half a stage
template <class D, bool kMnMajor>
__device__ __forceinline__ void DecodeBlock(const Arguments& a, const Codes& codes, bool special,
                                            int pair, const ColumnFactors& params, TwoSteps& to) {
  if ((D::kRestoresSpecials && special) || (D::kSubtractsZeroPoint && a.has_zero_points)) {
    DecodeTwoSteps<D, kMnMajor, true>(codes, pair, params, a.sign_flip, to);
  } else {
    DecodeTwoSteps<D, kMnMajor, false>(codes, pair, params, a.sign_flip, to);
  }
  if constexpr (D::kFlagsNaN) {
    if (special) InsertNaN<D, kMnMajor>(codes, to[0]);
  }
}

// scaled_acc += acc * scales, for 32 of K.
//   block  of the stage
template <class D, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void AddScaled(const Arguments& a, const uint8_t* slots, int block,
                                          const Accumulators<kRowFragments>& acc,
                                          Accumulators<kRowFragments>& scaled_acc) {
  float scale[4];
  FineScaleLoader<kMnMajor>::Read(a, slots, block, scale);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The factor comes first: factor * scale could overflow where the scaled sum does not.
        const float sum =
            D::kFactor == 1.0f ? acc.values[m][n][i] : acc.values[m][n][i] * D::kFactor;
        scaled_acc.values[m][n][i] += sum * scale[2 * m + i / 2];
      }
    }
  }
}

// The products of 32 of K, by the instruction of a warp.
template <DType kWide, int kRowFragments>
__device__ __forceinline__ void MultiplyBlock(const TwoSteps& fragments, const uint8_t* activations,
                                              int block, Accumulators<kRowFragments>& acc) {
  const int lane = threadIdx.x % 32;
  acc = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int chunk = 2 * (2 * block + i);
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
      const int row = ActivationRowOf(lane, n);
      uint32_t words[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = WgmmaActivationOffset(8 * kRowFragments, row, chunk + h) + lane % 4 * 4;
        words[h] = *reinterpret_cast<const uint32_t*>(activations + at);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) Mma<kWide>(acc.values[m][n], fragments[i][m], words[0], words[1]);
    }
  }
}

// Begins the same by the instruction of four warps.
template <DType kWide, int kRowFragments>
__device__ __forceinline__ void BeginBlock(TwoSteps& fragments, uint32_t activations, int block,
                                           Accumulators<kRowFragments>& acc) {
  constexpr int kHalfBytes = 8 * kRowFragments * 128;
#pragma unroll
  for (int i = 0; i < 16; ++i) PinRegister(fragments[i / 8][i / 4 % 2][i % 4]);
  WgmmaFence();
  const uint32_t from = activations + block / 2 * kHalfBytes + block % 2 * 64;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    Wgmma<kWide, kRowFragments, false>(acc.values[m], fragments[0][m],
                                       SwizzledMatrixDescriptor(from));
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    Wgmma<kWide, kRowFragments>(acc.values[m], fragments[1][m],
                                SwizzledMatrixDescriptor(from + 32));
  }
  WgmmaCommit();
}

// scaled_acc += the products of a stage. With wgmma the second 32 of K are decoded while the first
// are multiplied.
template <class D, DType kWide, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void MultiplyFineStage(const Arguments& a, const uint8_t* weights,
                                                  const ColumnFactors& params,
                                                  Accumulators<kRowFragments>& scaled_acc) {
  constexpr bool kWgmma = kHasWgmma && UsesWgmma(kRowFragments);
  const uint8_t* activations = weights + kWeightBytes;
  const uint8_t* slots = activations + ActivationBytes(kRowFragments);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kMnMajor, true>(weights, threadIdx.x, half);
    const bool special = WarpHasSpecials<D>(codes);
    Accumulators<kRowFragments> acc;
    TwoSteps fragments[2];
    DecodeBlock<D, kMnMajor>(a, codes, special, 0, params, fragments[0]);
    if constexpr (kWgmma) {
      const uint32_t from = SharedAddress(activations);
      BeginBlock<kWide>(fragments[0], from, 2 * half, acc);
      DecodeBlock<D, kMnMajor>(a, codes, special, 1, params, fragments[1]);
      WgmmaWait<0>();
      AddScaled<D, kMnMajor>(a, slots, 2 * half, acc, scaled_acc);
      BeginBlock<kWide>(fragments[1], from, 2 * half + 1, acc);
      WgmmaWait<0>();
    } else {
      MultiplyBlock<kWide>(fragments[0], activations, 2 * half, acc);
      AddScaled<D, kMnMajor>(a, slots, 2 * half, acc, scaled_acc);
      DecodeBlock<D, kMnMajor>(a, codes, special, 1, params, fragments[1]);
      MultiplyBlock<kWide>(fragments[1], activations, 2 * half + 1, acc);
    }
    AddScaled<D, kMnMajor>(a, slots, 2 * half + 1, acc, scaled_acc);
  }
}

// The scaled accumulators of a block's part of K.
template <class D, DType kActivation, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void AccumulateFine(const Arguments& a, const BlockTile& tile,
                                               uint8_t* stages,
                                               Accumulators<kRowFragments>& scaled_acc) {
  Pipeline<kActivation, kMnMajor, kRowFragments, true, true> pipeline(a, tile, blockIdx.y, stages);
  ColumnFactors params = {};
  if constexpr (D::kInteger) {
#pragma unroll
    for (uint32_t& addend : params.zero_addend) addend = D::ZeroPointAddend(a.weight, 0);
  }
#pragma unroll 1
  for (int32_t depth_tile = blockIdx.y; depth_tile < a.schedule.depth_tiles;
       depth_tile += a.schedule.split) {
    MultiplyFineStage<D, kActivation, kMnMajor>(a, pipeline.Next(), params, scaled_acc);
  }
}

}  // namespace jaxfp8::cuda::w8a16
