// Vectors of 512 bits as the compiler's own, and what the instructions in software share.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define JAXFP8_SOFT [[maybe_unused]] static inline

namespace jaxfp8 {
namespace software {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t S32x16 __attribute__((vector_size(64)));
typedef int32_t S32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));
typedef int8_t S8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef int16_t S16x32 __attribute__((vector_size(64)));
typedef int8_t S8x32 __attribute__((vector_size(32)));
typedef uint8_t U8x32 __attribute__((vector_size(32)));

template <typename To, typename From>
[[gnu::always_inline]] inline To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// An operation of AVX2 on both halves.
template <typename Operation>
inline __m512i Halves(__m512i a, __m512i b, Operation operation) {
  __m256i left[2], right[2];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 2; ++i) left[i] = operation(left[i], right[i]);
  std::memcpy(&a, left, sizeof a);
  return a;
}

// Subnormal values become 0 of their sign. On vectors that AVX2 has: GCC takes operators of wider
// ones apart, lane by lane.
[[gnu::always_inline]] inline __m256 Flush(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i subnormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i dropped = _mm256_srli_epi32(subnormal, 1);
  return _mm256_castsi256_ps(_mm256_andnot_si256(dropped, bits));
}

// The floats whose upper or lower 16 bits are those of bfloat16 in each lane.
[[gnu::always_inline]] inline __m256 UpperBF16(__m256i pairs) {
  return Flush(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff))));
}
[[gnu::always_inline]] inline __m256 LowerBF16(__m256i pairs) {
  return Flush(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
}

// A product per lane, added to `sum` with one rounding; subnormals become 0.
[[gnu::always_inline]] inline __m256 FlushedProduct(__m256 sum, __m256 left, __m256 right) {
  return Flush(_mm256_fmadd_ps(left, right, sum));
}

}  // namespace software

}  // namespace jaxfp8
