// Rounds FP8 codes to int8 in registers, to the codes of `jaxfp8.quantize`:
//
//   code = saturate(round(value / step)),   step = amax / 127       float32, ties to even
//
//   4 codes in a word    | c3 | c2 | c1 | c0 |
//     Decoder            |   v1    |   v0    |     float16, twice: v = value * 2^-kShift
//     * factor           exact: v has 4 bits, the factor 7
//     * inverse + magic  one rounding, to an integer in the low byte: v * factor * inverse is
//                        value / step up to 2^-13
//     PickBytes          | r3 | r2 | r1 | r0 |     four int8 codes
//
// Two float16 factors are exact enough. A quotient of two FP8 values is a tie, or 2^-11 of it away
// from one. The only tie is amax / 2, and there the factors lean to the side of float32's division.
// NaN becomes 0. An infinity saturates: 127, or -128. Runs on the host too: a test checks every
// code beside every amax.

#pragma once

#include <cstdint>

#include "common/quantize_scale.h"
#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"

namespace jaxfp8::cuda::imma {

// The factors of a line, in both halves of a word each.
struct Rounding {
  uint32_t factor, inverse, magic;
};

JAXFP8_HD uint32_t BothHalves(uint32_t half) { return half | half << 16; }

// `factor` and `inverse` in float16, by the three mantissa bits f of the amax:
// factor * inverse = 127 / (1 + f / 8) / 64, up to 2^-13.
JAXFP8_HD uint32_t FactorsOf(uint32_t f) {
  const auto pick = [f](uint32_t bit, uint32_t unset, uint32_t set) {
    return f & bit ? set : unset;
  };
  const uint32_t low = pick(2, pick(1, 0x39f04159, 0x3a90404d), pick(1, 0x38a0417e, 0x381041af));
  const uint32_t high = pick(2, pick(1, 0x38d04066, 0x39b03edf), pick(1, 0x39103f2b, 0x3be03c4d));
  return pick(4, low, high);
}

// The rounding of a line of FP8.
//   amax  its largest finite magnitude
template <DType kType>
JAXFP8_HD Rounding RoundingOf(float amax) {
  constexpr int kShift = kType == DType::kE4M3 ? 8 : 0;
  const uint32_t bits = BitsOf(amax > 0 ? amax : 1.0f);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const uint32_t factors = FactorsOf(bits >> 20 & 7);
  // Sums are v * factor * inverse + magic = (quotient + 1536) / 2^power. float16 holds the magic
  // from power -5 on; below that the inverse has the rest.
  const int wanted = 6 + kShift - exponent;
  const int power = wanted < -5 ? -5 : wanted;
  const auto inverse =
      static_cast<uint32_t>(static_cast<int>(factors & 0xffffu) + (wanted - power) * 1024);
  const auto magic = static_cast<uint32_t>((25 - power) << 10 | 0x200);
  return {BothHalves(factors >> 16), BothHalves(inverse), BothHalves(magic)};
}

// `rounded` with the codes of infinity and NaN set right. Rare.
template <DType kType>
JAXFP8_HD uint32_t WithSpecials(uint32_t codes, uint32_t rounded) {
  constexpr uint32_t kMinSpecial = kType == DType::kE4M3 ? 0x7f : 0x7c;
  for (int i = 0; i < 32; i += 8) {
    const uint32_t code = codes >> i & 0xffu, magnitude = code & 0x7fu;
    if (magnitude < kMinSpecial) continue;
    const bool infinite = kType == DType::kE5M2 && magnitude == kMinSpecial;
    const uint32_t saturated = code == magnitude ? 0x7f : 0x80;
    rounded = (rounded & ~(0xffu << i)) | (infinite ? saturated : 0) << i;
  }
  return rounded;
}

// The int8 codes of four FP8 codes of a line.
template <DType kType>
JAXFP8_HD uint32_t Round(uint32_t codes, const Rounding& r) {
  using Halves = Decoder<kType, DType::kF16>;
  constexpr uint32_t kSelectors[] = {0x9180u, 0xb3a2u}, kMinusZero = 0x80008000u;
  uint32_t pairs[2];
  for (int i = 0; i < 2; ++i) {
    const uint32_t v = Halves::template Decode<false>(PickBytes(codes, 0, kSelectors[i]), 0, 0);
    const uint32_t scaled = FusedPair<DType::kF16>(v, r.factor, kMinusZero);
    pairs[i] = FusedPair<DType::kF16>(scaled, r.inverse, r.magic);
  }
  const uint32_t rounded = PickBytes(pairs[0], pairs[1], 0x6420u);
  const bool special = (Halves::SpecialBits(codes) & 0x80808080u) != 0;
  return special ? WithSpecials<kType>(codes, rounded) : rounded;
}

// The larger of two numbers below 2^15 in each half of a word.
JAXFP8_HD uint32_t LargerHalves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t larger;  // as float16: its order is that of its bits
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
#endif
}

// The largest of four codes without their signs, and of `largest`: a code in each half. Infinity
// and NaN do not count.
template <DType kType>
JAXFP8_HD uint32_t LargestCodes(uint32_t codes, uint32_t largest) {
  if (Decoder<kType, DType::kF16>::SpecialBits(codes) & 0x80808080u) {  // rare
    constexpr uint32_t kMinSpecial = kType == DType::kE4M3 ? 0x7f : 0x7c;
    for (int i = 0; i < 32; i += 8) {
      if ((codes >> i & 0x7fu) >= kMinSpecial) codes &= ~(0xffu << i);
    }
  }
  largest = LargerHalves(largest, codes & 0x007f007fu);
  return LargerHalves(largest, codes >> 8 & 0x007f007fu);
}

}  // namespace jaxfp8::cuda::imma
