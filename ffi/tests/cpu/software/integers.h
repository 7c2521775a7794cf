// AVX-512 in software: bytes and integers.

#pragma once

#include "tests/cpu/software/memory.h"

namespace jaxfp8 {

JAXFP8_SOFT __m512i _mm512_mask_or_epi32(__m512i from, __mmask16 mask, __m512i a, __m512i b) {
  auto to = (software::U32x16)from;
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) to[i] = ((software::U32x16)a)[i] | ((software::U32x16)b)[i];
  }
  return (__m512i)to;
}

JAXFP8_SOFT __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
JAXFP8_SOFT __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
JAXFP8_SOFT __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return (__m512i)((software::U32x16)a << count);
}
JAXFP8_SOFT __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return (__m512i)((software::U32x16)a >> count);
}
JAXFP8_SOFT __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return (__m512i)((software::U16x32)a >> static_cast<uint16_t>(count));
}
JAXFP8_SOFT __m512i _mm512_add_epi8(__m512i a, __m512i b) {
  return (__m512i)((software::U8x64)a + (software::U8x64)b);
}
JAXFP8_SOFT __m512i _mm512_maskz_add_epi8(__mmask64 mask, __m512i a, __m512i b) {
  const __m512i sum = _mm512_add_epi8(a, b);
  return _mm512_maskz_loadu_epi8(mask, &sum);
}
JAXFP8_SOFT __m512i _mm512_maskz_mov_epi8(__mmask64 mask, __m512i a) {
  return _mm512_maskz_loadu_epi8(mask, &a);
}
JAXFP8_SOFT __m512i _mm512_abs_epi8(__m512i a) {
  const auto sign = (software::U8x64)((__v64qi)a < 0);
  return (__m512i)(((software::U8x64)a ^ sign) - sign);
}
JAXFP8_SOFT __mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b) {
  const auto left = (software::U8x64)a, right = (software::U8x64)b;
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t{left[i] >= right[i]} << i;
  return mask;
}
JAXFP8_SOFT __mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) {
  return _mm512_cmpge_epu8_mask(__m512i{}, a & b);
}

JAXFP8_SOFT __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpacklo_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpackhi_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpacklo_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_unpackhi_epi16(x, y); });
}
JAXFP8_SOFT __m512i _mm512_shuffle_epi8(__m512i a, __m512i b) {
  return software::Halves(a, b, [](__m256i x, __m256i y) { return _mm256_shuffle_epi8(x, y); });
}
JAXFP8_SOFT __m512i _mm512_mask_shuffle_epi8(__m512i from, __mmask64 mask, __m512i a, __m512i b) {
  _mm512_mask_storeu_epi8(&from, mask, _mm512_shuffle_epi8(a, b));
  return from;
}
JAXFP8_SOFT __m512i _mm512_permutex2var_epi8(__m512i a, __m512i places, __m512i b) {
  uint8_t entries[128], place[64];
  std::memcpy(entries, &a, sizeof a);
  std::memcpy(entries + 64, &b, sizeof b);
  std::memcpy(place, &places, sizeof place);
  for (uint8_t& byte : place) byte = entries[byte & 127];
  return _mm512_loadu_si512(place);
}
JAXFP8_SOFT __m512i _mm512_permutexvar_epi8(__m512i places, __m512i a) {
  return _mm512_permutex2var_epi8(a, _mm512_and_si512(places, _mm512_set1_epi8(63)), a);
}
JAXFP8_SOFT __m512i _mm512_permutexvar_epi32(__m512i places, __m512i a) {
  return (__m512i)__builtin_shuffle((software::S32x16)a, (software::S32x16)places);
}
JAXFP8_SOFT int _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((software::U32x16)a)[i];
  return static_cast<int>(sum);
}

}  // namespace jaxfp8
