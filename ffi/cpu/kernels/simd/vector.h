// The vectors of the instruction set this file is compiled for.
//
// Kernels are written once in terms of these; a file for each instruction set includes them with
// JAXFP8_ISA naming the namespace, so that copies for different machines never meet in the linker.

#ifndef JAXFP8_CPU_KERNELS_SIMD_VECTOR_H_
#define JAXFP8_CPU_KERNELS_SIMD_VECTOR_H_

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxfp8::JAXFP8_ISA {

// Bytes of a vector; vectors across a register tile, and rows down it.
#if defined(__AVX512F__)
inline constexpr int kBytes = 64;
inline constexpr int kVectors = 4, kRows = 6;  // 24 sums, 4 columns, 1 row of 32 registers
#elif defined(__AVX2__)
// 12 sums, 1 column, 3 rows of 16 registers. With 6 x 2, and so half as many codes decoded at once,
// 256 rows times e4m3 took 1.1 times as long, 16 of prepared ones 1.15 times (AMD Zen 3).
inline constexpr int kBytes = 32;
inline constexpr int kVectors = 4, kRows = 3;
#else
inline constexpr int kBytes = 16;
inline constexpr int kVectors = 2, kRows = 6;
#endif

inline constexpr int kLanes = kBytes / 4;
inline constexpr int kColumns = kVectors * kLanes;
// Lines side by side that are read together, and of which those that follow are asked for
// meanwhile: a processor looks ahead in few pages, each line may be in a page of its own, and an L1
// holds so few that are a power of two apart. With 32 at a time, and none asked for, packing bytes
// took 1.2 times as long (AMD Zen 5), 1.5 times from memory.
inline constexpr int kLinesTogether = 8;
// Bytes of each of them that are asked for ahead in L1: with 2048, one row times 4096 x 4096
// took 1.2 times as long (AMD Zen 5), with 512, of a weight in memory, 1.1 times. Twice as many in
// L2.
inline constexpr int64_t kLineAhead = 1024;
// Lines of columns that lie neither side by side nor along the depth: read value by value.
inline constexpr int64_t kLinesScattered = 32;
// Bytes ahead that are asked for of prepared columns, and of columns along the depth: of a single
// stream the processor alone stays behind. For few rows times columns along it, twice as many in
// L2.
inline constexpr int64_t kStreamAhead = 4096;
// The depth of columns along it, or prepared, that is packed in one go. On processors with VBMI (a
// Xeon with AMX, M = 16) all of a slice at once took 1.2 times as long; on others (Cascade Lake)
// 0.9 times.
#if defined(JAXFP8_VBMI)
inline constexpr int64_t kDepthTurned = 256;
#else
inline constexpr int64_t kDepthTurned = 1 << 20;
#endif
// Bytes of each of them that are asked for ahead: 16 rows times e4m3 took 1.4 times as long without
// (AMD Zen 5), but 0.95 times with AMX.
#if defined(__AMX_TILE__)
inline constexpr int64_t kTurnedAhead = 0;
#else
inline constexpr int64_t kTurnedAhead = 256;
#endif

// The depth at which a packed strip has 16 KB.
template <int kGroup>
inline constexpr int kSlice = 4096 / kColumns * kGroup;

typedef float F32 __attribute__((vector_size(kBytes)));
typedef int32_t S32 __attribute__((vector_size(kBytes)));
typedef double F64 __attribute__((vector_size(kBytes)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

// Half a vector of 32-bit lanes: what one vector of doubles is converted from.
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

// a * b + c, rounded once, but for portable code, where it is the compiler's choice. By itself GCC
// would fuse some products and sums and leave others, and what is found of a row would depend on
// where in a tile it lies.
inline F32 MultiplyAdd(F32 a, F32 b, F32 c) {
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

// A line of bytes is widened by interleaving, within 128-bit lanes. Either its dwords are moved
// first (`DwordsToLanes`), so that columns come in order; or they come by lanes: those of a lane of
// the bytes, 16, in the same lane of all vectors. `ExchangeLanes` puts a strip of 32-bit values by
// lanes in order, or the other way round: in registers, for a vector that was stored in parts is
// not read before they have left for L1. `ShuffleLanes` has the bytes of each lane in the order of
// `place`, and 0 where that is negative.
#if defined(__AVX512F__)
typedef __m512i Integers;

inline S32 ShuffleLanes(S32 bytes, __m128i place) {
  return (S32)_mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(place));
}

// 16 columns of a vector come from a dword of each lane.
inline __m512i DwordsToLanes(__m512i bytes) {
  const __m512i to_lane = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(to_lane, bytes);
}

inline __m512i AsTheyAre(__m512i bytes) { return bytes; }

inline void ExchangeLanes(void* strip) {
  constexpr S32 kLow = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  constexpr S32 kHigh = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
  auto* at = static_cast<uint8_t*>(strip);
  S32 a[kVectors], b[kVectors];
  for (int v = 0; v < kVectors; ++v) a[v] = Load<S32>(at + v * kBytes);
  for (int v = 0; v < 2; ++v) {
    b[2 * v] = __builtin_shuffle(a[v], a[v + 2], kLow);
    b[2 * v + 1] = __builtin_shuffle(a[v], a[v + 2], kHigh);
  }
  for (int v = 0; v < 2; ++v) {
    Store(at + 2 * v * kBytes, __builtin_shuffle(b[v], b[v + 2], kLow));
    Store(at + (2 * v + 1) * kBytes, __builtin_shuffle(b[v], b[v + 2], kHigh));
  }
}
#elif defined(__AVX2__)
typedef __m256i Integers;

inline S32 ShuffleLanes(S32 bytes, __m128i place) {
  return (S32)_mm256_shuffle_epi8((__m256i)bytes, _mm256_broadcastsi128_si256(place));
}

// 8 columns of a vector come from a dword of both lanes. By lanes, dwords 0 and 2 of each are in
// vectors 0 and 1, dwords 1 and 3 in vectors 2 and 3: so exchanging them is its own inverse.
inline __m256i DwordsToLanes(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
}

inline __m256i AsTheyAre(__m256i bytes) { return bytes; }

inline void ExchangeLanes(void* strip) {
  auto* at = static_cast<uint8_t*>(strip);
  __m256i a[kVectors];
  for (int v = 0; v < kVectors; ++v) a[v] = Load<__m256i>(at + v * kBytes);
  for (int v = 0; v < 2; ++v) {
    Store(at + v * kBytes, _mm256_permute2x128_si256(a[v], a[v + 2], 0x20));
    Store(at + (v + 2) * kBytes, _mm256_permute2x128_si256(a[v], a[v + 2], 0x31));
  }
}
#else
void ExchangeLanes(void* strip);  // where there is nothing to gain, nor a definition
#endif

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_SIMD_VECTOR_H_
