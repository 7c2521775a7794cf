// A run of values of any type as float32, vector by vector.

#pragma once

#include "common/decode.h"
#include "common/dtype.h"
#include "cpu/kernels/decode/dispatch.h"
#include "cpu/kernels/decode/float8.h"
#include "cpu/kernels/simd/vector.h"
#include "cpu/problem.h"

namespace jaxfp8::JAXFP8_ISA {

// The 256 values of an 8-bit float type.
struct DecodeTable {
  float value[256];
};

template <DType kType>
inline constexpr DecodeTable kDecoded = [] {
  DecodeTable table{};
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    table.value[code] = kType == DType::kE4M3 ? DecodeE4M3(byte) : DecodeE5M2(byte);
  }
  return table;
}();

template <DType kType>
inline float DecodeOne(const uint8_t* from) {
  if constexpr (kType == DType::kF32) return Load<float>(from);
  if constexpr (kType == DType::kBF16) return DecodeBF16(Load<uint16_t>(from));
  if constexpr (kType == DType::kF16) return DecodeF16(Load<uint16_t>(from));
  if constexpr (kType == DType::kS8) return static_cast<int8_t>(*from);
  if constexpr (kType == DType::kU8) return *from;
  if constexpr (IsFloat8(kType)) return kDecoded<kType>.value[*from];
}

// kLanes values at once, of any type but the FP8 ones.
#if defined(__AVX512F__)

template <DType kType>
[[gnu::always_inline]] inline __m512 DecodeVector(const uint8_t* from) {
  if constexpr (kType == DType::kF32) return Load<__m512>(from);
  if constexpr (kType == DType::kF16) return _mm512_cvtph_ps(Load<__m256i>(from));
  if constexpr (kType == DType::kBF16) {
    const __m512i codes = _mm512_cvtepu16_epi32(Load<__m256i>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16));
  }
  if constexpr (kType == DType::kS8) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load<__m128i>(from)));
  }
  if constexpr (kType == DType::kU8) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(Load<__m128i>(from)));
  }
}

#elif defined(__AVX2__)

template <DType kType>
[[gnu::always_inline]] inline __m256 DecodeVector(const uint8_t* from) {
  if constexpr (kType == DType::kF32) return Load<__m256>(from);
  if constexpr (kType == DType::kF16) return _mm256_cvtph_ps(Load<__m128i>(from));
  if constexpr (kType == DType::kBF16) {
    const __m256i codes = _mm256_cvtepu16_epi32(Load<__m128i>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(codes, 16));
  }
  const __m128i bytes = _mm_cvtsi64_si128(Load<int64_t>(from));
  if constexpr (kType == DType::kS8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  if constexpr (kType == DType::kU8) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}

#endif

// kNR values at once.
template <DType kType>
[[gnu::always_inline]] inline void DecodeVectors(const uint8_t* from, F32 (&to)[kVectors]) {
#if defined(__AVX2__)
  if constexpr (IsFloat8(kType)) {
    DecodeFloat8<kType>(from, to);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      to[v] = (F32)DecodeVector<kType>(from + v * kLanes * SizeOf(kType));
    }
  }
#else
  float values[kNR];
  for (int i = 0; i < kNR; ++i) values[i] = DecodeOne<kType>(from + i * SizeOf(kType));
  std::memcpy(to, values, sizeof to);
#endif
}

// The value of byte j of each lane.
template <DType kType>
[[gnu::always_inline]] inline F32 DecodeByte(S32 quads, int j) {
  if constexpr (kType == DType::kS8) {
    return __builtin_convertvector((quads << (24 - 8 * j)) >> 24, F32);
  }
  const S32 codes = (quads >> (8 * j)) & 0xff;
  if constexpr (!IsFloat8(kType)) return __builtin_convertvector(codes, F32);
  F32 values;
  for (int i = 0; i < kLanes; ++i) values[i] = kDecoded<kType>.value[codes[i]];
  return values;
}

// The four values of each lane: to[j] has those of bytes j.
template <DType kType>
[[gnu::always_inline]] inline void DecodeQuads(S32 quads, F32 (&to)[kQuad]) {
#if defined(__AVX2__)
  if constexpr (IsFloat8(kType)) return DecodeFloat8Quads<kType>(quads, to);
#endif
#pragma GCC unroll 4
  for (int j = 0; j < kQuad; ++j) to[j] = DecodeByte<kType>(quads, j);
}

template <DType kType>
inline void DecodeRun(const uint8_t* from, int64_t count, float* to) {
  F32 values[kVectors];
  int64_t i = 0;
  for (; i + kNR <= count; i += kNR) {
    DecodeVectors<kType>(from + i * SizeOf(kType), values);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(to + i + v * kLanes, values[v]);
  }
  if (i == count) return;
  uint8_t rest[kNR * SizeOf(kType)] = {};
  std::memcpy(rest, from + i * SizeOf(kType), (count - i) * SizeOf(kType));
  DecodeVectors<kType>(rest, values);
  std::memcpy(to + i, values, (count - i) * sizeof(float));
}

inline void DecodeLine(DType type, const uint8_t* from, int64_t count, float* to) {
  WithType(type, [&]<DType kType>() { DecodeRun<kType>(from, count, to); });
}

}  // namespace jaxfp8::JAXFP8_ISA
