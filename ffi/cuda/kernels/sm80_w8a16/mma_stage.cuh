// Multiplies a stage of `sm80_w8a16` with `mma.sync`, the tensor core instruction of a warp.
//
//   shared: weights                               shared: activations
//     128 columns x 128 K, codes                    8 * kRowFragments rows x 128 K
//      | LoadCodes: a lane, 4 columns x 16 K         | LoadTwoSteps: a lane, 1 row x 8 K
//      | DecodeStep: 16-bit A fragments              | B fragments as they are
//      +------------ mma.m16n8k16, 8 steps a stage --+
//                    acc += A * B                    a warp has 32 columns and all rows

#pragma once

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/mma.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/fragments.h"

namespace jaxfp8::cuda::w8a16 {

// The norm of a launch: the squares of the activations, values[n] of row lane / 4 of fragment n,
// and the kind of the gain. The warps share the steps of a stage.
template <int kRowFragments>
struct RowNorm {
  float squares[kRowFragments] = {};
  bool wide_gain = false;
  float gain_offset = 0.0f;
};

// Sums the squares of the activations of two steps, and multiplies them by their gains.
template <int kRowFragments>
__device__ __forceinline__ void Normalise(const uint8_t* activations, int pair,
                                          RowNorm<kRowFragments>& norm,
                                          Vector16 (&rows)[kRowFragments]) {
  static_assert(kWarps == 4);  // and a stage has four pairs of steps
  if (threadIdx.x / 32 == pair) {
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) AddSquares(rows[n], norm.squares[n]);
  }
  const int lane = threadIdx.x % 32;
  if (!norm.wide_gain && norm.gain_offset == 0.0f) {
    const Vector16 gains = *GainsOf<kRowFragments>(activations, lane, pair, 2);
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[n].words[i] = MultiplyBF16Pair(rows[n].words[i], gains.words[i]);
      }
    }
    return;
  }
  const Vector16* from = GainsOf<kRowFragments>(activations, lane, pair, norm.wide_gain ? 4 : 2);
  const Vector16 first = from[0], second = from[norm.wide_gain];
  float gains[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float narrow[2];
    DecodeWord<DType::kBF16>(first.words[i], narrow);
    const int at = 2 * i % 4;
    const Vector16& wide = i < 2 ? first : second;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      gains[2 * i + k] =
          norm.gain_offset + (norm.wide_gain ? __uint_as_float(wide.words[at + k]) : narrow[k]);
    }
  }
#pragma unroll
  for (int n = 0; n < kRowFragments; ++n) MultiplyWide(rows[n], gains);
}

// acc += the products of half a stage.
//   half           a half of the stage's K, 0 or 1
//   kActivation    type of the activations
//   kFullDecode    see `Decoder::Decode`
//   kNorm          whether activations are multiplied by a gain, and their squares summed
//   kRowFragments  rows of the tile in units of 8
template <class D, DType kActivation, bool kMnMajor, bool kFullDecode, bool kNorm,
          int kRowFragments>
__device__ __forceinline__ void MultiplyCodes(const Codes& codes, const uint8_t* activations,
                                              int half, const ColumnParams& params,
                                              uint32_t sign_flip, float (&acc)[2][kRowFragments][4],
                                              RowNorm<kRowFragments>& norm) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    Vector16 rows[kRowFragments];  // the activations of two steps
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
      rows[n] = LoadTwoSteps<kActivation>(activations, lane, n, 2 * half + pair);
    }
    if constexpr (kNorm) Normalise<kRowFragments>(activations, 2 * half + pair, norm, rows);
#pragma unroll
    for (int in_pair = 0; in_pair < 2; ++in_pair) {
      uint32_t fragments[2][4];
      DecodeStep<D, kMnMajor, kFullDecode>(codes.values[2 * pair + in_pair], params, sign_flip,
                                           fragments);
#pragma unroll
      for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Mma<WideOf(kActivation)>(acc[m][n], fragments[m], rows[n].words[2 * in_pair],
                                   rows[n].words[2 * in_pair + 1]);
        }
      }
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
template <class D, DType kActivation, bool kMnMajor, bool kNorm, int kRowFragments>
__device__ __forceinline__ void MultiplyStage(const Arguments& a, const uint8_t* weights,
                                              const uint8_t* activations,
                                              const ColumnParams& params,
                                              Accumulators<kRowFragments>& acc,
                                              RowNorm<kRowFragments>& norm) {
  // Unrolled, both halves are in registers at once. Wider tiles have no room for this. With 16 rows
  // on an H200, one half at a time is 1.03x faster for [N, K] and 1.06x slower for [K, N].
#pragma unroll(kRowFragments == 1 || (kRowFragments == 2 && kMnMajor) ? 2 : 1)
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kMnMajor, false>(weights, threadIdx.x, half);
    // The whole warp takes one branch, so the instructions of a step stay together.
    const bool special = WarpHasSpecials<D>(codes);
    if ((D::kRestoresSpecials && special) || (D::kSubtractsZeroPoint && a.has_zero_points)) {
      MultiplyCodes<D, kActivation, kMnMajor, true, kNorm>(codes, activations, half, params,
                                                           a.sign_flip, acc.values, norm);
    } else {
      MultiplyCodes<D, kActivation, kMnMajor, false, kNorm>(codes, activations, half, params,
                                                            a.sign_flip, acc.values, norm);
    }
    if constexpr (D::kFlagsNaN) {
      if (special) AddNaN<D, kActivation, kMnMajor>(codes, acc.values);
    }
  }
}

}  // namespace jaxfp8::cuda::w8a16
