// Exact int32 accumulators of pairs of 16-bit values: bytes on machines without 8-bit dot products.
//
//     lane:  | a[k] a[k+1] |     acc[lane] += a[k] * b[k][lane] + a[k+1] * b[k+1][lane]

#pragma once

#include <limits>

#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/policy/lane_policy.h"

namespace jaxfp8::JAXFP8_ISA {

inline void WidenLine(DType type, const uint8_t* from, int64_t count, int16_t* to) {
  if (type == DType::kS8) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

// kLanes pairs of bytes as pairs of 16-bit values.
template <DType kType>
inline S32 WidenPairs(const uint8_t* from) {
#if defined(__AVX512F__)
  const auto bytes = Load<__m256i>(from);
  return (S32)(kType == DType::kS8 ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#elif defined(__AVX2__)
  const auto bytes = Load<__m128i>(from);
  return (S32)(kType == DType::kS8 ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#else
  int16_t wide[2 * kLanes];
  WidenLine(kType, from, 2 * kLanes, wide);
  return Load<S32>(wide);
#endif
}

struct Int16Pairs {
  using Vector = S32;
  using Lane = int32_t;
  static constexpr int kGroup = 2;
  static constexpr bool kExact = true;
  static constexpr DType kShiftedRows = DType::kNone, kShiftedColumns = DType::kNone;
  static constexpr bool kSubtractsZeros = false;
  // Zero points are subtracted from rows during packing. Sums of columns instead made one row 1.7x
  // slower (AVX2, AMD Zen 3).
  static constexpr bool kSubtractsRowZeros = true;
  static_assert(kGemvDepth * (255 + kNearZero) * 255 <= std::numeric_limits<int32_t>::max());

  static Vector MultiplyAdd(Vector acc, Lane row, Vector column) {
    return Dot(acc, Vector{} + row, column);
  }

  static Vector Dot(Vector acc, Vector row, Vector column) {
#if defined(__AVX512F__)
    return acc + (S32)_mm512_madd_epi16((__m512i)row, (__m512i)column);
#elif defined(__AVX2__)
    return acc + (S32)_mm256_madd_epi16((__m256i)row, (__m256i)column);
#else
    return acc + (row >> 16) * (column >> 16) + ((row << 16) >> 16) * ((column << 16) >> 16);
#endif
  }

  static Vector Ones() { return Vector{} + 0x00010001; }

  template <DType kType>
  static void LoadAlong(const uint8_t* from, Vector (&to)[kVectors / kGroup]) {
    for (int i = 0; i < kVectors / kGroup; ++i) to[i] = WidenPairs<kType>(from + i * 2 * kLanes);
  }

  template <DType kType>
  static void LoadQuads(S32 quads, Vector (&to)[kQuad / kGroup]) {
    for (int i = 0; i < kQuad / kGroup; ++i) to[i] = PairOfQuads<kType>(quads, 2 * i);
  }

  // Bytes `first` and the next of each 32-bit lane.
  template <DType kType>
  [[gnu::always_inline]] static Vector PairOfQuads(S32 quads, int first) {
#if defined(__AVX2__)
    // Signed ones come to the upper halves of words and are shifted down; the rest is 0.
    constexpr char k0 = static_cast<char>(0x80);
    const __m128i upper = _mm_setr_epi8(k0, 0, k0, 1, k0, 4, k0, 5, k0, 8, k0, 9, k0, 12, k0, 13);
    const __m128i lower = _mm_setr_epi8(0, k0, 1, k0, 4, k0, 5, k0, 8, k0, 9, k0, 12, k0, 13, k0);
    const __m128i place =
        _mm_add_epi8(kType == DType::kS8 ? upper : lower, _mm_set1_epi8(static_cast<char>(first)));
    const S32 words = ShuffleLanes(quads, place);
    typedef int16_t Words __attribute__((vector_size(kBytes)));
    return kType == DType::kS8 ? (S32)((Words)words >> 8) : words;
#else
    const S32 pair = quads >> (8 * first);
    if constexpr (kType == DType::kS8) {
      return (((pair << 24) >> 24) & 0xffff) | ((pair << 16) >> 24 << 16);
    } else {
      return (pair & 0xff) | (pair & 0xff00) << 8;
    }
#endif
  }

#if defined(__AVX512F__)
  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    uint8_t pairs[kNR * kGroup];
    for (int i = 0; i < kNR; i += 16) {
      const auto even = Load<__m128i>(line[0] + i), odd = Load<__m128i>(line[1] + i);
      Store(pairs + 2 * i, _mm_unpacklo_epi8(even, odd));
      Store(pairs + 2 * i + 16, _mm_unpackhi_epi8(even, odd));
    }
    for (int v = 0; v < kVectors; ++v) column[v] = WidenPairs<kType>(pairs + v * 2 * kLanes);
  }
#elif defined(__AVX2__)
  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    const __m256i even = DwordsToLanes(Load<__m256i>(line[0]));
    const __m256i odd = DwordsToLanes(Load<__m256i>(line[1]));
    WidenHalves<kType>(_mm256_unpacklo_epi8(even, odd), column[0], column[2]);
    WidenHalves<kType>(_mm256_unpackhi_epi8(even, odd), column[1], column[3]);
  }

  // The pairs of bytes of the lower, and of the upper half of each lane.
  template <DType kType>
  [[gnu::always_inline]] static void WidenHalves(__m256i pairs, Vector& low, Vector& high) {
    if constexpr (kType == DType::kS8) {
      low = (S32)_mm256_srai_epi16(_mm256_unpacklo_epi8(pairs, pairs), 8);
      high = (S32)_mm256_srai_epi16(_mm256_unpackhi_epi8(pairs, pairs), 8);
    } else {
      low = (S32)_mm256_unpacklo_epi8(pairs, __m256i{});
      high = (S32)_mm256_unpackhi_epi8(pairs, __m256i{});
    }
  }
#else
  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    uint8_t pairs[kNR * kGroup];
    for (int i = 0; i < kNR; ++i) {
      pairs[2 * i] = line[0][i];
      pairs[2 * i + 1] = line[1][i];
    }
    for (int v = 0; v < kVectors; ++v) column[v] = WidenPairs<kType>(pairs + v * 2 * kLanes);
  }
#endif

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackRow(const Operand& side, const Block& block, int64_t i, const uint8_t* from,
                      void* to, const Panel& panel) {
    auto* line = static_cast<int16_t*>(to);
    WidenLine(side.dtype, from, block.depth, line);
    if (block.depth % 2) line[block.depth] = 0;
    if (side.near_zeros) {
      const auto zero = static_cast<int16_t>(panel.zero[i]);
      panel.zero[i] = 0;
      for (int64_t k = 0; k < block.depth; ++k) line[k] -= zero;
    }
    if (!block.sums) return;
    int32_t sum = 0;
    for (int64_t k = 0; k < block.depth; ++k) sum += line[k];
    panel.sum[i] += sum;
  }
};

static_assert(LanePolicy<Int16Pairs>);

}  // namespace jaxfp8::JAXFP8_ISA
