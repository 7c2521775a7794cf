// AVX-512 VNNI and BF16 in software: dot products, and rounding to bfloat16.

#pragma once

#include "tests/cpu/software/vector.h"

namespace jaxfp8 {

// Four unsigned bytes times four signed ones per lane, added without saturation.
JAXFP8_SOFT __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto total = (software::U32x16)sum;
  for (int i = 0; i < 4; ++i) {
    const auto left = (software::S32x16)((software::U32x16)a >> (8 * i) & 0xffu);
    const auto right = (software::S32x16)((software::U32x16)b << (24 - 8 * i)) >> 24;
    total += (software::U32x16)(left * right);
  }
  return (__m512i)total;
}

// Two products of bfloat16 per lane, the odd one first, each added with one rounding.
JAXFP8_SOFT __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  struct Halves {
    __m256 sum[2];
  };
  struct Pairs {
    __m256i of[2];
  };
  auto next = software::As<Halves>(sum);
  const auto left = software::As<Pairs>(a), right = software::As<Pairs>(b);
  for (int i = 0; i < 2; ++i) {
    const __m256 odd =
        software::FlushedProduct(software::Flush(next.sum[i]), software::UpperBF16(left.of[i]),
                                 software::UpperBF16(right.of[i]));
    next.sum[i] = software::FlushedProduct(odd, software::LowerBF16(left.of[i]),
                                           software::LowerBF16(right.of[i]));
  }
  return software::As<__m512>(next);
}

// The lower half of the result comes from `b`; rounds to nearest even, subnormals become 0.
JAXFP8_SOFT __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  uint16_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const float value = i < 16 ? b[i] : a[i - 16];
    const auto bits = software::As<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t code = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    if (magnitude < 0x00800000u) code = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) code = bits >> 16 | 0x40u;
    codes[i] = static_cast<uint16_t>(code);
  }
  return software::As<__m512bh>(codes);
}

}  // namespace jaxfp8
