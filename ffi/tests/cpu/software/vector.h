// Vectors of 512 bits as the compiler's own, and what the instructions in software share.

#ifndef JAXFP8_TESTS_CPU_SOFTWARE_VECTOR_H_
#define JAXFP8_TESTS_CPU_SOFTWARE_VECTOR_H_

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

// Subnormal values become 0 of their sign.
[[gnu::always_inline]] inline F32x16 Flush(F32x16 value) {
  const U32x16 bits = As<U32x16>(value);
  const U32x16 subnormal = (U32x16)((bits & 0x7f800000u) == 0u);
  return As<F32x16>(bits & ~(subnormal & 0x7fffffffu));
}

// One product per lane added to `sum` with one rounding.
[[gnu::always_inline]] inline F32x16 Fused(F32x16 sum, F32x16 left, F32x16 right) {
  struct Halves {
    __m256 of[2];
  };
  auto next = As<Halves>(sum);
  const auto a = As<Halves>(left), b = As<Halves>(right);
  for (int i = 0; i < 2; ++i) next.of[i] = _mm256_fmadd_ps(a.of[i], b.of[i], next.of[i]);
  return As<F32x16>(next);
}

// The same where subnormals count as 0, and become it.
inline F32x16 FlushedProduct(F32x16 sum, U32x16 a, U32x16 b) {
  return Flush(Fused(Flush(sum), Flush(As<F32x16>(a)), Flush(As<F32x16>(b))));
}

}  // namespace software

}  // namespace jaxfp8

#endif  // JAXFP8_TESTS_CPU_SOFTWARE_VECTOR_H_
