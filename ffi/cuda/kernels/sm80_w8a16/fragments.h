// From a stage of `sm80_w8a16` in shared memory to the fragments of the tensor core instruction.
//
//   weights, [N, K]: a column has 128 codes        weights, [K, N]: a depth has 128 codes
//     column c    | 16 codes |  LDS.128              depth k    | 4 codes |  LDS.32
//     column c+1  | 16 codes |  per lane             depth k+1  | 4 codes |  per lane, 16 times
//     ...     by kBlocks twice 8 codes, LDS.64                ...
//             by kWgmma 8 times 2 codes, LDS.U16
//        |                                              |
//        +--> Codes: 4 columns x 16 depths of a lane <--+
//                |  PickBytes: two codes of a column at depths 2p, 2p + 1 into a word
//                |  Decoder::Decode: both to 16 bits
//                v
//             fragments[2][4], the A operands of two m16n8k16
//
// The code also runs on the host: a test multiplies a tile with it.

#pragma once

#include <cstdint>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

struct alignas(16) Vector16 {
  uint32_t words[4];
};
struct alignas(8) Vector8 {
  uint32_t words[2];
};

// Scales and zero points of a lane's four columns, for one scale block.
struct ColumnFactors {
  uint32_t scale[4];        // as they are stored (scales.cuh)
  uint32_t zero_addend[4];  // of `Decoder::ZeroPointAddend`
};

// Accumulators of a warp: values[m][n] belong to 16 of its columns (m) and 8 of the rows (n).
template <int kRowFragments>
struct Accumulators {
  float values[2][kRowFragments][4];
};

// The codes of a lane for four steps. values[step][i] are four depths of column i ([N, K]), or four
// columns at depth i ([K, N]).
struct Codes {
  uint32_t values[4][4];
};

// Loads the codes of a lane for one half of a stage's K.
template <bool kMnMajor, Order kOrder>
JAXFP8_HD Codes LoadCodes(const uint8_t* weights, int thread, int half) {
  const int lane = thread % 32, column = ColumnOf(thread / 32, lane);
  Codes codes;
  for (int j = 0; j < 4; ++j) {
    const int step = 4 * half + j;
    for (int i = 0; i < 4; ++i) {
      if constexpr (kMnMajor) {
        const int depth = DepthOf<kOrder>(lane, step, i);
        const int offset = MnMajorOffset<kOrder>(depth, column / 16) + column % 16;
        codes.values[j][i] = *reinterpret_cast<const uint32_t*>(weights + offset);
      } else if constexpr (kOrder == Order::kWgmma) {
        const int offset =
            KContiguousOffset<kOrder>(column + i, step) + DepthOf<kOrder>(lane, 0, 0);
        const auto* from = reinterpret_cast<const uint16_t*>(weights + offset);
        codes.values[j][i] = from[0] | static_cast<uint32_t>(from[4]) << 16;
      }
    }
    if constexpr (!kMnMajor && kOrder == Order::kRuns) {
      const int offset =
          KContiguousOffset<kOrder>(column + j, DepthOf<kOrder>(lane, 4 * half, 0) / 16);
      const Vector16 run = *reinterpret_cast<const Vector16*>(weights + offset);
      for (int i = 0; i < 4; ++i) codes.values[i][j] = run.words[i];
    }
    for (int pair = 0; !kMnMajor && kOrder == Order::kBlocks && pair < 2; ++pair) {
      const int depth = DepthOf<kOrder>(lane, 4 * half + 2 * pair, 0);
      const int offset = KContiguousOffset<kOrder>(column + j, depth / 16) + depth % 16;
      const Vector8 run = *reinterpret_cast<const Vector8*>(weights + offset);
      for (int i = 0; i < 2; ++i) codes.values[2 * pair + i][j] = run.words[i];
    }
  }
  return codes;
}

// The activations of a lane for steps 2 * pair and 2 * pair + 1 of mma.sync, two words each.
template <DType kActivation, Order kOrder>
JAXFP8_HD Vector16 LoadTwoSteps(const uint8_t* activations, int lane, int fragment, int pair) {
  const int chunk = DepthOf<kOrder>(lane, 2 * pair, 0) / 8;
  const uint8_t* from =
      activations + ActivationOffset<kOrder>(ActivationRowOf(lane, fragment), chunk);
  if constexpr (!IsFloat8(kActivation)) return *reinterpret_cast<const Vector16*>(from);
  const Vector8 codes = *reinterpret_cast<const Vector8*>(from);
  Vector16 values;
  for (int i = 0; i < 4; ++i) {
    values.words[i] = HalvesOfFloat8Pair<kActivation>(codes.words[i / 2] >> (16 * (i % 2)));
  }
  return values;
}

// Decodes the weights of one step into two fragments: fragments[m][2 * pair + h] holds column
// 2 * m + h of the lane at depths 2 * pair and 2 * pair + 1.
template <class D, bool kMnMajor, bool kFullDecode>
JAXFP8_HD void DecodeStep(const uint32_t (&codes)[4], const ColumnFactors& params,
                          uint32_t sign_flip, uint32_t (&fragments)[2][4]) {
  for (int i = 0; i < 4; ++i) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t picked = kMnMajor
                                  ? PickBytes(codes[2 * pair], codes[2 * pair + 1], PickColumn(i))
                                  : PickBytes(codes[i], 0, PickDepths(pair));
      fragments[i / 2][2 * pair + i % 2] = D::template Decode<kFullDecode>(
          picked, sign_flip, D::kInteger ? params.zero_addend[i] : 0);
    }
  }
}

#ifdef __CUDACC__
// Whether some lane of the warp holds an infinity or NaN. The plain decoding gets those wrong.
template <class D>
__device__ __forceinline__ bool WarpHasSpecials(const Codes& codes) {
  if constexpr (!D::kFlagsNaN && !D::kRestoresSpecials) return false;
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) any |= D::SpecialBits(codes.values[i / 4][i % 4]);
  return __any_sync(0xffffffffu, any & 0x80808080u);
}
#endif

// NaN fragments for each column with a NaN code in this lane; 0 elsewhere.
template <class D, bool kMnMajor>
JAXFP8_HD void NaNFragments(const Codes& codes, uint32_t (&fragments)[2][4]) {
  for (int i = 0; i < 4; ++i) {
    uint32_t any = 0;
    for (int step = 0; step < 4; ++step) {
      for (int d = 0; d < (kMnMajor ? 4 : 1); ++d) {
        any |= D::IsNaN(codes.values[step][kMnMajor ? d : i]);
      }
    }
    if (kMnMajor) any &= 0xffu << (8 * i);
    fragments[i / 2][i % 2] = any ? 0x7fff7fffu : 0;  // NaN in bfloat16 and in float16
    fragments[i / 2][2 + i % 2] = 0;
  }
}

}  // namespace jaxfp8::cuda::w8a16
