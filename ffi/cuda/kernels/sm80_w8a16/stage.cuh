// Multiplies a stage of `sm80_w8a16` with `mma.sync`, the tensor core instruction of a warp.
//
//   shared: weights                               shared: activations
//     128 columns x 128 K, codes                    8 * kRowFragments rows x 128 K
//      | LoadCodes: a lane, 4 columns x 16 K         | LoadTwoSteps: a lane, 1 row x 8 K
//      | DecodeStep: 16-bit A fragments              | B fragments as they are
//      +------------ mma.m16n8k16, 8 steps a stage --+
//                    acc += A * B                    a warp has 32 columns and all rows

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/mma.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/fine_scales.cuh"
#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

// acc += the products of two steps, 32 of K.
//   pair           of steps, of the two in half a stage
//   rows           the activations of the steps
//   kWide          type that is multiplied
//   kFullDecode    see `Decoder::Decode`
//   kRowFragments  rows of the tile in units of 8
template <class D, DType kWide, bool kMnMajor, bool kFullDecode, int kRowFragments>
__device__ __forceinline__ void MultiplyTwoSteps(const Codes& codes, int pair,
                                                 const Vector16 (&rows)[kRowFragments],
                                                 const ColumnFactors& params, uint32_t sign_flip,
                                                 float (&acc)[2][kRowFragments][4]) {
#pragma unroll
  for (int in_pair = 0; in_pair < 2; ++in_pair) {
    uint32_t fragments[2][4];
    DecodeStep<D, kMnMajor, kFullDecode>(codes.values[2 * pair + in_pair], params, sign_flip,
                                         fragments);
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Mma<kWide>(acc[m][n], fragments[m], rows[n].words[2 * in_pair],
                   rows[n].words[2 * in_pair + 1]);
      }
    }
  }
}

// acc += the products of half a stage.
//   half    a half of the stage's K, 0 or 1
//   scales  scale the sums of two steps if they are fine
template <class D, DType kActivation, bool kMnMajor, bool kFullDecode, int kRowFragments,
          class Scales>
__device__ __forceinline__ void MultiplyCodes(const Codes& codes, const uint8_t* activations,
                                              int half, const ColumnFactors& params,
                                              uint32_t sign_flip, const Scales& scales,
                                              float (&acc)[2][kRowFragments][4]) {
  constexpr DType kWide = WideOf(kActivation);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    Vector16 rows[kRowFragments];
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
      rows[n] = LoadTwoSteps<kActivation, Scales::kOrder>(activations, threadIdx.x % 32, n,
                                                          2 * half + pair);
    }
    if constexpr (Scales::kFine) {
      float sums[2][kRowFragments][4] = {};
      MultiplyTwoSteps<D, kWide, kMnMajor, kFullDecode>(codes, pair, rows, params, sign_flip, sums);
#pragma unroll
      for (int m = 0; m < 2; ++m) scales.Add(pair, m, D::kFactor, sums[m], acc[m]);
    } else {
      MultiplyTwoSteps<D, kWide, kMnMajor, kFullDecode>(codes, pair, rows, params, sign_flip, acc);
    }
  }
}

// Makes the accumulators NaN in each column with a NaN code in this warp.
template <class D, DType kActivation, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void AddNaN(const Codes& codes, float (&acc)[2][kRowFragments][4]) {
  uint32_t fragments[2][4];
  NaNFragments<D, kMnMajor>(codes, fragments);
#pragma unroll
  for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) Mma<WideOf(kActivation)>(acc[m][n], fragments[m], 0, 0);
  }
}

// acc += the products of a stage.
//   Scales  `FineScales`, or `NoScales`
template <class D, DType kActivation, bool kMnMajor, class Scales, int kRowFragments>
__device__ __forceinline__ void MultiplyStage(const Arguments& a, const uint8_t* weights,
                                              const uint8_t* activations,
                                              const ColumnFactors& params,
                                              Accumulators<kRowFragments>& acc) {
  const uint8_t* slots = activations + ActivationBytes(kRowFragments);
  // Unrolled, both halves are in registers at once. Wider tiles have no room for this. With 16 rows
  // on an H200, one half at a time is 1.03x faster for [N, K] and 1.06x slower for [K, N].
#pragma unroll(kRowFragments == 1 || (kRowFragments == 2 && kMnMajor) ? 2 : 1)
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kMnMajor, Scales::kOrder>(weights, threadIdx.x, half);
    const Scales scales(slots, half);
    // The whole warp takes one branch, so the instructions of a step stay together.
    const bool special = WarpHasSpecials<D>(codes);
    if ((D::kRestoresSpecials && special) || (D::kSubtractsZeroPoint && a.has_zero_points)) {
      MultiplyCodes<D, kActivation, kMnMajor, true>(codes, activations, half, params, a.sign_flip,
                                                    scales, acc.values);
    } else {
      MultiplyCodes<D, kActivation, kMnMajor, false>(codes, activations, half, params, a.sign_flip,
                                                     scales, acc.values);
    }
    if constexpr (D::kFlagsNaN) {
      if (special) AddNaN<D, kActivation, kMnMajor>(codes, acc.values);
    }
  }
}

// Multiplies a stage of `sm80_w8a16` with `wgmma`, the instruction of four warps of sm_90a.
//
//   shared weights, codes                          shared activations, swizzled
//      | LoadCodes, DecodeStep (fragments.h)           |
//   registers: A fragments, as for mma.sync            |  read by the tensor cores themselves
//      +---- wgmma.m64nNk16, N = 8 * kRowFragments ----+
//            acc += A * B, asynchronously: the next two steps are decoded meanwhile

// The A operands of two steps.
using TwoSteps = uint32_t[2][2][4];

template <class D, bool kMnMajor, bool kFullDecode>
__device__ __forceinline__ void DecodeTwoSteps(const Codes& codes, int pair,
                                               const ColumnFactors& params, uint32_t sign_flip,
                                               TwoSteps& fragments) {
#pragma unroll
  for (int in_pair = 0; in_pair < 2; ++in_pair) {
    DecodeStep<D, kMnMajor, kFullDecode>(codes.values[2 * pair + in_pair], params, sign_flip,
                                         fragments[in_pair]);
  }
}

// Makes the fragments NaN in each column with a NaN code in this lane.
template <class D, bool kMnMajor>
__device__ __forceinline__ void InsertNaN(const Codes& codes, uint32_t (&fragments)[2][4]) {
  uint32_t nan[2][4];
  NaNFragments<D, kMnMajor>(codes, nan);
#pragma unroll
  for (int i = 0; i < 8; ++i) fragments[i / 4][i % 4] |= nan[i / 4][i % 4];
}

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
  // The fragments must be complete here. Computed between the wgmma instructions, they would make
  // each instruction wait.
#pragma unroll
  for (int i = 0; i < 16; ++i) PinRegister(to[i / 8][i / 4 % 2][i % 4]);
}

// acc += the products of a stage, two steps per pass: the tensor cores work on one pair of steps
// while the next pair is decoded.
template <class D, DType kWide, bool kMnMajor, int kRowFragments>
__device__ __forceinline__ void MultiplyStageWgmma(const Arguments& a, const uint8_t* weights,
                                                   uint32_t activations,
                                                   const ColumnFactors& params,
                                                   Accumulators<kRowFragments>& acc) {
  constexpr int kHalfBytes = 8 * kRowFragments * 128;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kMnMajor, Order::kWgmma>(weights, threadIdx.x, half);
    const bool special = WarpHasSpecials<D>(codes);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      TwoSteps fragments;
      DecodeBlock<D, kMnMajor>(a, codes, special, pair, params, fragments);
      WgmmaFence();
#pragma unroll
      for (int in_pair = 0; in_pair < 2; ++in_pair) {
        const uint64_t matrix =
            SwizzledMatrixDescriptor(activations + half * kHalfBytes + (2 * pair + in_pair) * 32);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Wgmma<kWide, kRowFragments>(acc.values[m], fragments[in_pair][m], matrix);
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
    }
  }
  WgmmaWait<0>();
}

}  // namespace jaxfp8::cuda::w8a16
