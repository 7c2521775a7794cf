// A run of values of any type as float32, vector by vector.

#ifndef JAXFP8_CPU_KERNELS_DECODE_LINE_H_
#define JAXFP8_CPU_KERNELS_DECODE_LINE_H_

#include "common/decode.h"
#include "common/dtype.h"
#include "cpu/kernels/simd.h"

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

// kLanes values at once. Both FP8 types are decoded through float16, whose conversion to float32 is
// exact for subnormals too: e5m2 is its upper byte, e4m3 has the same fields one bit lower and a
// bias smaller by 8.
#if defined(__AVX512F__)

template <DType kType>
inline __m512 DecodeVector(const uint8_t* from) {
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
  if constexpr (IsFloat8(kType)) {
    const __m256i codes = _mm256_cvtepu8_epi16(Load<__m128i>(from));
    const __m256i upper = _mm256_slli_epi16(codes, 8);
    if constexpr (kType == DType::kE5M2) return _mm512_cvtph_ps(upper);
    const __m256i fields = _mm256_set1_epi16(static_cast<int16_t>(0xbfff));
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(upper, 1), fields);
    const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
    const __m256i magnitude = _mm256_set1_epi16(0x7f);
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(codes, magnitude), magnitude);
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
  }
}

#elif defined(__AVX2__)

template <DType kType>
inline __m256 DecodeVector(const uint8_t* from) {
  if constexpr (kType == DType::kF32) return Load<__m256>(from);
  if constexpr (kType == DType::kF16) return _mm256_cvtph_ps(Load<__m128i>(from));
  if constexpr (kType == DType::kBF16) {
    const __m256i codes = _mm256_cvtepu16_epi32(Load<__m128i>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(codes, 16));
  }
  const __m128i bytes = _mm_cvtsi64_si128(Load<int64_t>(from));
  if constexpr (kType == DType::kS8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  if constexpr (kType == DType::kU8) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  if constexpr (IsFloat8(kType)) {
    const __m128i codes = _mm_cvtepu8_epi16(bytes);
    const __m128i upper = _mm_slli_epi16(codes, 8);
    if constexpr (kType == DType::kE5M2) return _mm256_cvtph_ps(upper);
    const __m128i fields = _mm_set1_epi16(static_cast<int16_t>(0xbfff));
    const __m128i halves = _mm_and_si128(_mm_srai_epi16(upper, 1), fields);
    const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
    const __m128i magnitude = _mm_set1_epi16(0x7f);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(codes, magnitude), magnitude);
    return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
  }
}

#endif

template <DType kType>
inline void DecodeRun(const uint8_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + kLanes <= count; i += kLanes) {
    Store(to + i, DecodeVector<kType>(from + i * SizeOf(kType)));
  }
#endif
  for (; i < count; ++i) to[i] = DecodeOne<kType>(from + i * SizeOf(kType));
}

inline void DecodeLine(DType type, const uint8_t* from, int64_t count, float* to) {
  switch (type) {
    case DType::kF32:
      return DecodeRun<DType::kF32>(from, count, to);
    case DType::kBF16:
      return DecodeRun<DType::kBF16>(from, count, to);
    case DType::kF16:
      return DecodeRun<DType::kF16>(from, count, to);
    case DType::kE4M3:
      return DecodeRun<DType::kE4M3>(from, count, to);
    case DType::kE5M2:
      return DecodeRun<DType::kE5M2>(from, count, to);
    case DType::kS8:
      return DecodeRun<DType::kS8>(from, count, to);
    default:
      return DecodeRun<DType::kU8>(from, count, to);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_DECODE_LINE_H_
