// The fragments of 8-bit weights: a thread's codes in a stage of the ring, decoded to A operands of
// wgmma.
//
//   stage of lines of K, 64 rows x 64 bytes of a wave      of lines of N, 64 depths x 64 bytes
//   row | 2t 2t+1 ... 2t+8 2t+9 ...                        depth 2t    | row, row + 1
//   row + 8 | the same                                           2t + 1 | row, row + 1 ...
//
// A code of NaN makes its whole row NaN, wherever in K it is, so rows with one are remembered and
// made NaN in the end.

#pragma once

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm90/shared.cuh"
#include "cuda/kernels/sm90_w8a16/weight_rows.cuh"

namespace jaxfp8::cuda::sm90 {

// K of a wgmma of 16-bit operands, and how many a stage has.
inline constexpr int kFragmentDepth = 16, kFragments = kMixedDepth / kFragmentDepth;
// Those of a fine scale.
inline constexpr int kFineFragments = kFineDepth / kFragmentDepth;

// Where a thread finds its codes in a stage of the ring: two rows of each wave, at depths 2t, 2t +
// 1, 2t + 8, 2t + 9 of each fragment, where t = thread % 4. Half a word is
//   lines of K   two depths of a row
//   lines of N   two rows, which are neighbours, at one depth
// Chunk c of 16 of line i lies at place c ^ i / 2 % 4. Eight lines are 512 bytes either way.
struct CodePlaces {
  uint32_t first, second;      // of the first stage's first fragment: both halves of a word
  uint32_t later[kFragments];  // what is added for a fragment

  template <typename L>
  __device__ __forceinline__ static CodePlaces Of(uint32_t shared, bool mn_major) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads,
                  lane = thread % 32;
    const int32_t warp = thread % kWarpgroupThreads / 32, line = lane / 4, t = lane % 4;
    const int32_t warpgroup = thread / kWarpgroupThreads * L::kWgmmas * kWgmmaRows;
    const int32_t place = line / 2 % 4;
    CodePlaces places;
    places.first = shared + L::kLhsAt + warpgroup * L::kLhsLine;
    if (mn_major) {
      places.first += 2 * t * L::kLhsLine + (warp ^ t) * 16 + 2 * line;
    } else {
      places.first += (warp * kWarpRows + line) * L::kLhsLine + place * 16 + 2 * t;
    }
    places.second = mn_major ? L::kLhsLine : 8;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      places.later[i] = mn_major ? i * kFragmentDepth * L::kLhsLine : ((place ^ i) - place) * 16;
    }
    return places;
  }
};

// The codes of a fragment.
template <typename L>
struct FragmentCodes {
  uint32_t words[L::kWgmmas][2];

  // first, second  of the half words
  __device__ __forceinline__ void Load(uint32_t first, uint32_t second) {
#pragma unroll
    for (int i = 0; i < 2 * L::kWgmmas; ++i) {
      const uint32_t at = (i / 2 * kWgmmaRows + i % 2 * 8) * L::kLhsLine;
      words[i / 2][i % 2] = LoadShared16(first + at) | LoadShared16(second + at) << 16;
    }
  }
};

// Two sign-extended codes less their zero point times a power of two, exactly; NaN of e4m3 as a
// number.
template <DType kWeight, DType kWide, RowTerms kTerms>
__device__ __forceinline__ uint32_t DecodePair(uint32_t picked, uint32_t sign_flip, uint32_t addend,
                                               uint32_t power) {
  using D = Decoder<kWeight, kWide>;
  uint32_t pair;
  if constexpr (D::kRestoresSpecials) {
    // e5m2 is the upper byte of float16, with infinity and NaN.
    float values[2];
    DecodeWord<DType::kF16>(picked << 8 & 0xff00ff00u, values);
    pair = EncodeWord<kWide>(values);
  } else {
    constexpr bool kSubtracts = D::kInteger && kTerms != RowTerms::kNone;
    pair = D::template Decode<kSubtracts>(picked, sign_flip, addend);
  }
  // Adding -0 keeps the sign of zeros.
  return kTerms == RowTerms::kScales ? FusedPair<kWide>(pair, power, 0x80008000u) : pair;
}

// A pair times a scale, rounded to bfloat16. Subnormals are kept.
__device__ __forceinline__ uint32_t ScaledPair(uint32_t pair, const TwoTerms& scale) {
  return FusedPair<DType::kBF16>(pair, scale.high,
                                 FusedPair<DType::kBF16>(pair, scale.low, 0x80008000u));
}
__device__ __forceinline__ uint32_t ScaledPair(uint32_t pair, float scale) {
  const float low = FloatFromBits(pair << 16), high = FloatFromBits(pair & 0xffff0000u);
  return EncodeFloat16Pair<DType::kBF16>(low * scale, high * scale);
}

// Bits that tell whether a row of a wave has had a NaN, as the codes lie in `FragmentCodes`.
template <typename L>
using RowFlags = uint32_t[L::kWgmmas][2];

// The A operands of a wgmma of each wave.
//   block  of fine scales in the step
template <typename L, DType kWeight, DType kWide, RowTerms kTerms>
__device__ __forceinline__ void DecodeFragment(const FragmentCodes<L>& codes, int block,
                                               const WeightRows<L, kWeight, kWide, kTerms>& rows,
                                               uint32_t (&fragment)[L::kWgmmas][4],
                                               RowFlags<L>& flags) {
  using D = Decoder<kWeight, kWide>;
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t picked =
          PickBytes(codes.words[w][0], codes.words[w][1], rows.weights.picks[i]);
      const int row = 2 * w + i % 2;
      if constexpr (kTerms == RowTerms::kFine) {
        const uint32_t pair =
            DecodePair<kWeight, kWide, RowTerms::kNone>(picked, rows.sign_flip, 0, 0);
        fragment[w][i] = ScaledPair(pair, rows.scale[block][row]);
      } else {
        fragment[w][i] = DecodePair<kWeight, kWide, kTerms>(picked, rows.sign_flip,
                                                            rows.addend[row], rows.power[row]);
      }
      PinRegister(fragment[w][i]);
    }
    if constexpr (D::kFlagsNaN) {
#pragma unroll
      for (int i = 0; i < 2; ++i) flags[w][i] |= D::IsNaN(codes.words[w][i]);
    }
  }
}

// Makes the rows NaN that have had one. Four threads have a row.
template <typename L, int kColumns>
__device__ __forceinline__ void MakeRowsNaN(float (&acc)[L::kWgmmas][kColumns / 2],
                                            const RowFlags<L>& flags, bool mn_major) {
#pragma unroll
  for (int i = 0; i < 2 * L::kWgmmas; ++i) {
    const uint32_t both = flags[i / 2][0] | flags[i / 2][1];
    uint32_t any =
        mn_major ? both & (i % 2 ? 0x80008000u : 0x00800080u) : flags[i / 2][i % 2] & 0x80808080u;
    any |= __shfl_xor_sync(~0u, any, 1), any |= __shfl_xor_sync(~0u, any, 2);
    if (!__any_sync(~0u, any)) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      if (any && j / 2 % 2 == i % 2) acc[i / 2][j] = __int_as_float(0x7fc00000);
    }
  }
}

}  // namespace jaxfp8::cuda::sm90
