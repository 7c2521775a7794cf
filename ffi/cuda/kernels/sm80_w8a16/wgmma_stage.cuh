// Multiplies a stage of `sm80_w8a16` with `wgmma`, the instruction of four warps of sm_90a.
//
//   shared weights, codes                          shared activations, swizzled
//      | LoadCodes, DecodeStep (fragments.h)           |
//   registers: A fragments, as for mma.sync            |  read by the tensor cores themselves
//      +---- wgmma.m64nNk16, N = 8 * kRowFragments ----+
//            acc += A * B, asynchronously: the next two steps are decoded meanwhile
//
#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

template <class D, bool kMnMajor, bool kFullDecode>
__device__ __forceinline__ void DecodeTwoSteps(const Codes& codes, int pair,
                                               const ColumnFactors& params, uint32_t sign_flip,
                                               uint32_t (&fragments)[2][2][4]) {
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
    const bool full_decode =
        (D::kRestoresSpecials && special) || (D::kSubtractsZeroPoint && a.has_zero_points);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t fragments[2][2][4];
      if (full_decode) {
        DecodeTwoSteps<D, kMnMajor, true>(codes, pair, params, a.sign_flip, fragments);
      } else {
        DecodeTwoSteps<D, kMnMajor, false>(codes, pair, params, a.sign_flip, fragments);
      }
      if constexpr (D::kFlagsNaN) {
        if (special) InsertNaN<D, kMnMajor>(codes, fragments[0]);
      }
      // The fragments must be complete here. Computed between the wgmma instructions, they would
      // make each instruction wait.
#pragma unroll
      for (int i = 0; i < 16; ++i) PinRegister(fragments[i / 8][i / 4 % 2][i % 4]);
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
