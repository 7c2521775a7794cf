// AVX-512 in software: constants, loads, stores and parts of vectors.
//
// Masked loads and stores touch the bytes of their mask only, one by one, so that AddressSanitizer
// sees each of them.

#pragma once

#include "tests/cpu/software/vector.h"

namespace jaxfp8 {

JAXFP8_SOFT __m512i _mm512_setzero_si512() { return __m512i{}; }
JAXFP8_SOFT __m512i _mm512_set1_epi32(int value) {
  return (__m512i)(software::S32x16{} + int32_t{value});
}
JAXFP8_SOFT __m512i _mm512_set1_epi8(char value) {
  return (__m512i)(software::U8x64{} + static_cast<uint8_t>(value));
}
JAXFP8_SOFT __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }

JAXFP8_SOFT __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                      int j, int k, int l, int m, int n, int o, int p) {
  return (__m512i)software::S32x16{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
JAXFP8_SOFT __m512i _mm512_broadcast_i32x4(__m128i a) {
  const __m128i parts[4] = {a, a, a, a};
  return software::As<__m512i>(parts);
}
JAXFP8_SOFT __m128i _mm512_extracti32x4_epi32(__m512i a, int part) {
  __m128i parts[4];
  std::memcpy(parts, &a, sizeof parts);
  return parts[part];
}
JAXFP8_SOFT __m128i _mm512_castsi512_si128(__m512i a) { return _mm512_extracti32x4_epi32(a, 0); }

JAXFP8_SOFT __m512i _mm512_loadu_si512(const void* from) {
  __m512i value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
JAXFP8_SOFT void _mm512_storeu_si512(void* to, __m512i value) {
  std::memcpy(to, &value, sizeof value);
}
JAXFP8_SOFT __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) {
  uint8_t value[64] = {};
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) value[i] = static_cast<const uint8_t*>(from)[i];
  }
  return _mm512_loadu_si512(value);
}
JAXFP8_SOFT void _mm512_mask_storeu_epi8(void* to, __mmask64 mask, __m512i from) {
  uint8_t value[64];
  _mm512_storeu_si512(value, from);
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) static_cast<uint8_t*>(to)[i] = value[i];
  }
}

JAXFP8_SOFT __m512i _mm512_castsi256_si512(__m256i a) {
  __m512i to = {};
  std::memcpy(&to, &a, sizeof a);
  return to;
}
// Into the upper half.
JAXFP8_SOFT __m512i _mm512_inserti64x4(__m512i a, __m256i b, int) {
  std::memcpy(reinterpret_cast<char*>(&a) + sizeof b, &b, sizeof b);
  return a;
}

}  // namespace jaxfp8
