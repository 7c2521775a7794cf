// The vectors of the instruction set this file is compiled for.
//
// Kernels are written once, on these vectors. A file for each instruction set includes them with
// JAXFP8_ISA naming the namespace: copies for different machines never meet in the linker.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxfp8::JAXFP8_ISA {

// Bytes of a vector; vectors across the register tile, and rows down it.
#if defined(__AVX512F__)
inline constexpr int kBytes = 64;
inline constexpr int kVectors = 4, kMR = 6;  // 24 accumulators, 4 columns, 1 row: 32 registers
#elif defined(__AVX2__)
// 12 accumulators, 1 column, 3 rows: 16 registers. 6 x 2 would decode half as many codes per pass.
inline constexpr int kBytes = 32;
inline constexpr int kVectors = 4, kMR = 3;
#else
inline constexpr int kBytes = 16;
inline constexpr int kVectors = 2, kMR = 6;
#endif

inline constexpr int kLanes = kBytes / 4;
inline constexpr int kNR = kVectors * kLanes;  // columns of a micro-panel
// Lines of [K, N] read together by a GEMV. Each may be in a page of its own, and a core prefetches
// few pages at a time. An L1 also holds few cache lines at a distance of a power of two. With 32
// lines, packing was 1.2x slower (AMD Zen 5).
inline constexpr int kLinesTogether = 8;
// The prefetch distance of each line in bytes. With 2048 one row was 1.2x slower (AMD Zen 5).
inline constexpr int64_t kLineAhead = 1024;
// The prefetch distance of prepared columns in bytes: they are a single stream, and the core's own
// prefetcher falls behind.
inline constexpr int64_t kStreamAhead = 4096;
// The prefetch distance of columns along K while they are transposed, in bytes; 0 for none. Without
// prefetching, 16 rows were 1.4x slower (AMD Zen 5), but 1.05x faster with AMX.
#if defined(__AMX_TILE__)
inline constexpr int64_t kTransposeAhead = 0;
#else
inline constexpr int64_t kTransposeAhead = 256;
#endif

typedef float F32 __attribute__((vector_size(kBytes)));
typedef int32_t S32 __attribute__((vector_size(kBytes)));
typedef double F64 __attribute__((vector_size(kBytes)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

// Half a vector of 32-bit lanes: converts to one vector of doubles.
typedef float HalfF32 __attribute__((vector_size(kBytes / 2)));
typedef int32_t HalfS32 __attribute__((vector_size(kBytes / 2)));

inline constexpr int kWide = kBytes / 8;  // doubles in a vector

template <typename T>
inline T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
inline void Store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// a * b + c, rounded once; in portable code the compiler decides. GCC by itself fuses some products
// and sums and not others: bits would depend on a row's place in the tile.
inline F32 FusedMultiplyAdd(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Half a vector in float64. GCC 12 takes a vector of AVX-512 apart for it.
inline F64 ToDoubles(HalfF32 values) {
#if defined(__AVX512F__)
  return (F64)_mm512_cvtps_pd((__m256)values);
#else
  return __builtin_convertvector(values, F64);
#endif
}

inline F64 ToDoubles(HalfS32 values) {
#if defined(__AVX512F__)
  return (F64)_mm512_cvtepi32_pd((__m256i)values);
#else
  return __builtin_convertvector(values, F64);
#endif
}

// Two vectors of doubles in float32.
inline F32 ToFloats(F64 low, F64 high) {
#if defined(__AVX512F__)
  const __m512i floats = _mm512_castsi256_si512((__m256i)_mm512_cvtpd_ps((__m512d)low));
  return (F32)_mm512_inserti64x4(floats, (__m256i)_mm512_cvtpd_ps((__m512d)high), 1);
#elif defined(__AVX2__)
  return (F32)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
#else
  const HalfF32 halves[] = {__builtin_convertvector(low, HalfF32),
                            __builtin_convertvector(high, HalfF32)};
  return Load<F32>(halves);
#endif
}

// A line of bytes is widened by interleaving within 128-bit lanes. Moving its dwords first
// (`DwordsToLanes`) leaves the columns in order. `ShuffleLanes` permutes the bytes of each 128-bit
// lane by `place`; negative places give 0.
#if defined(__AVX512F__)

inline S32 ShuffleLanes(S32 bytes, __m128i place) {
  return (S32)_mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(place));
}

// 16 columns of a vector come from a dword of each lane.
inline __m512i DwordsToLanes(__m512i bytes) {
  const __m512i to_lane = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(to_lane, bytes);
}

#elif defined(__AVX2__)

inline S32 ShuffleLanes(S32 bytes, __m128i place) {
  return (S32)_mm256_shuffle_epi8((__m256i)bytes, _mm256_broadcastsi128_si256(place));
}

// 8 columns of a vector come from a dword of both lanes.
inline __m256i DwordsToLanes(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
}

#endif

}  // namespace jaxfp8::JAXFP8_ISA
