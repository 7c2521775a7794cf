// Keys and values of 16 tokens, from global memory straight into the fragments of a warp.
//
//   lane 4g + q of a warp   keys     tokens g and g + 8: every fourth run of 16 bytes, from run q
//                           values   tokens 2q, 2q + 1, 2q + 8, 2q + 9: every eighth run, from g
//
// mma.sync sums over d of keys in any order, if the query has the same one. So a lane's codes of a
// token are its part of both halves of K. Values are pairs of two tokens: a byte permutation makes
// them as it widens codes. Output rows are a permutation of d (`PlaceOf`).

#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/kernels/common/decode16.cuh"

namespace jaxfp8::cuda::attention {

// Loads kWords words that are read once.
template <int kWords>
__device__ __forceinline__ void LoadOnce(const char* from, uint32_t* to) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "l"(from));
  }
}

template <DType kCache>
using CodesOf = Decoder<kCache, DType::kBF16>;

// NaN among four codes, in the bits of 0x80808080.
template <DType kCache>
__device__ __forceinline__ uint32_t NaNBits(uint32_t codes) {
  if constexpr (kCache == DType::kE4M3) return CodesOf<kCache>::SpecialBits(codes);
  return 0;
}

template <DType kCache, int kWidth>
struct Keys {
  static constexpr int kRuns = kWidth * SizeOf(kCache) / 64;  // of a lane, for each token
  static constexpr int kPerRun = 16 / SizeOf(kCache);         // values
  static constexpr int kFragments = kPerRun / 4;              // of K = 16, in a run
  uint32_t words[2][4 * kRuns];

  // Where a lane's run begins.
  __device__ __forceinline__ static int Start(int run, int q) { return (4 * run + q) * kPerRun; }

  __device__ __forceinline__ void Load(const char* text, int64_t token_bytes, int token, int last,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* from = text + min(token + lane / 4 + 8 * i, last) * token_bytes + lane % 4 * 16;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) LoadOnce<4>(from + 64 * run, words[i] + 4 * run);
    }
  }

  // Two values of a token: the half of a fragment's K.
  __device__ __forceinline__ uint32_t Pair(int i, int run, int fragment, int half) const {
    if constexpr (SizeOf(kCache) == 2) {
      return words[i][4 * run + 2 * fragment + half];
    } else {
      const uint32_t word = words[i][4 * run + fragment];
      return CodesOf<kCache>::template Decode<false>(
          PickBytes(word, word, half ? 0xb3a2u : 0x9180u), 0, 0);
    }
  }

  __device__ __forceinline__ uint32_t AnyNaN(int i) const {
    uint32_t any = 0;
#pragma unroll
    for (uint32_t word : words[i]) any |= NaNBits<kCache>(word);
    return any & 0x80808080u;
  }
};

template <DType kCache, int kWidth>
struct Values {
  static constexpr int kOwn = kWidth / 8;  // values of a lane, for each token
  static constexpr int kBytes = kOwn * SizeOf(kCache);
  static constexpr int kRunBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kPerRun = kRunBytes / SizeOf(kCache);
  uint32_t words[4][kBytes / 4];

  // The place in a vector of value `e` of lanes 4g to 4g + 3.
  __device__ __forceinline__ static int PlaceOf(int g, int e) {
    return (8 * (e / kPerRun) + g) * kPerRun + e % kPerRun;
  }

  __device__ __forceinline__ void Load(const char* text, int64_t token_bytes, int token, int last,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + 2 * (lane % 4) + i % 2 + 8 * (i / 2);
      const char* from = text + min(at, last) * token_bytes + lane / 4 * kRunBytes;
#pragma unroll
      for (int run = 0; run < kBytes / kRunBytes; ++run) {
        LoadOnce<kRunBytes / 4>(from + 8 * kRunBytes * run, words[i] + kRunBytes / 4 * run);
      }
    }
  }

  // Value `e` of two neighbouring tokens; `second` for those from 8 on.
  __device__ __forceinline__ uint32_t Pair(int e, int second) const {
    const uint32_t (&low)[kBytes / 4] = words[2 * second];
    const uint32_t (&high)[kBytes / 4] = words[2 * second + 1];
    if constexpr (SizeOf(kCache) == 2) {
      return PickBytes(low[e / 2], high[e / 2], e % 2 ? 0x7632u : 0x5410u);
    } else {
      const uint32_t byte = e % 4, selector = 0xc480u + 0x1111u * byte;
      return CodesOf<kCache>::template Decode<false>(PickBytes(low[e / 4], high[e / 4], selector),
                                                     0, 0);
    }
  }

  __device__ __forceinline__ uint32_t AnyNaN() const {
    uint32_t any = 0;
#pragma unroll
    for (const auto& token : words) {
#pragma unroll
      for (uint32_t word : token) any |= NaNBits<kCache>(word);
    }
    return any & 0x80808080u;
  }

  // Bit e is set if value `e` of some token is NaN.
  __device__ __forceinline__ uint32_t NaNs() const {
    uint32_t found = 0;
    if constexpr (kCache == DType::kE4M3) {
#pragma unroll
      for (const auto& token : words) {
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) {
          const uint32_t bits = CodesOf<kCache>::IsNaN(token[i]) >> 7;
          found |= ((bits | bits >> 7 | bits >> 14 | bits >> 21) & 15u) << (4 * i);
        }
      }
    }
    return found;
  }
};

}  // namespace jaxfp8::cuda::attention
