// AVX-512 in software: conversions between types, and float arithmetic.

#pragma once

#include <cmath>

#include "tests/cpu/software/vector.h"

namespace jaxfp8 {

JAXFP8_SOFT __m512 _mm512_cvtph_ps(__m256i codes) {
  __m128i half[2];
  std::memcpy(half, &codes, sizeof half);
  const __m256 value[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
  __m512 both;
  std::memcpy(&both, value, sizeof both);
  return both;
}
JAXFP8_SOFT __m512i _mm512_cvtepu16_epi32(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::U16x16)codes, software::S32x16);
}
JAXFP8_SOFT __m128i _mm512_cvtepi32_epi8(__m512i wide) {
  return (__m128i) __builtin_convertvector((software::S32x16)wide, software::S8x16);
}
JAXFP8_SOFT __m512i _mm512_cvtepi8_epi16(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::S8x32)codes, software::S16x32);
}
JAXFP8_SOFT __m512i _mm512_cvtepu8_epi16(__m256i codes) {
  return (__m512i) __builtin_convertvector((software::U8x32)codes, software::S16x32);
}
JAXFP8_SOFT __m512i _mm512_cvtepi8_epi32(__m128i codes) {
  return (__m512i) __builtin_convertvector((software::S8x16)codes, software::S32x16);
}
JAXFP8_SOFT __m512i _mm512_cvtepu8_epi32(__m128i codes) {
  return (__m512i) __builtin_convertvector((software::U8x16)codes, software::S32x16);
}
JAXFP8_SOFT __m512 _mm512_cvtepi32_ps(__m512i values) {
  return __builtin_convertvector((software::S32x16)values, __m512);
}

JAXFP8_SOFT __m512d _mm512_cvtepi32_pd(__m256i values) {
  return __builtin_convertvector((software::S32x8)values, __m512d);
}
JAXFP8_SOFT __m512d _mm512_cvtps_pd(__m256 values) {
  return __builtin_convertvector(values, __m512d);
}

JAXFP8_SOFT __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  __m256 left[2], right[2], added[2];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  std::memcpy(added, &c, sizeof added);
  for (int i = 0; i < 2; ++i) added[i] = _mm256_fmadd_ps(left[i], right[i], added[i]);
  return software::As<__m512>(added);
}

JAXFP8_SOFT __m256 _mm512_cvtpd_ps(__m512d values) {
  return __builtin_convertvector(values, __m256);
}

// Rounds towards 0, whatever is asked for.
JAXFP8_SOFT __m256 _mm512_cvt_roundpd_ps(__m512d values, int) {
  __m256 to;
  for (int i = 0; i < 8; ++i) {
    const auto nearest = static_cast<float>(values[i]);
    const auto bits = software::As<uint32_t>(nearest);
    const bool away = std::fabs(double{nearest}) > std::fabs(values[i]);
    to[i] = software::As<float>(bits - (away ? 1 : 0));
  }
  return to;
}

// Whether they differ, whatever is asked for; NaN does.
JAXFP8_SOFT __mmask8 _mm512_cmp_pd_mask(__m512d a, __m512d b, int) {
  __mmask8 differ = 0;
  for (int i = 0; i < 8; ++i) differ |= static_cast<__mmask8>(!(a[i] == b[i])) << i;
  return differ;
}

}  // namespace jaxfp8
