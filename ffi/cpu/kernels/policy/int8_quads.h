// Exact int32 accumulators of quads of bytes.
//
//     lane:  | a[k] a[k+1] a[k+2] a[k+3] |     acc[lane] += sum of a[k+i] * b[k+i][lane]
//
// `vpdpbusd` multiplies unsigned by signed bytes: signed columns are shifted up by 128 and unsigned
// rows down by 128. AMX multiplies signed bytes: unsigned ones are shifted down. A shift counts as
// part of the zero point. Sums of rows are computed once, during packing; sums of columns only if
// rows have a zero point or a shift.

#pragma once

#include <algorithm>

#include "cpu/kernels/policy/lane_policy.h"

namespace jaxfp8::JAXFP8_ISA {

// Four lines of 64 bytes as 64 groups of four, columns by lanes.
inline void Interleave(const __m512i (&line)[4], __m512i (&group)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi8(line[0], line[1]);
  const __m512i high01 = _mm512_unpackhi_epi8(line[0], line[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(line[2], line[3]);
  const __m512i high23 = _mm512_unpackhi_epi8(line[2], line[3]);
  group[0] = _mm512_unpacklo_epi16(low01, low23);
  group[1] = _mm512_unpackhi_epi16(low01, low23);
  group[2] = _mm512_unpacklo_epi16(high01, high23);
  group[3] = _mm512_unpackhi_epi16(high01, high23);
}

template <bool kSigned>
struct Int8QuadsOf {
  using Vector = S32;
  using Lane = int32_t;
  static constexpr int kGroup = 4;
  static constexpr bool kExact = true;
  static constexpr DType kShiftedRows = DType::kU8;
  static constexpr DType kShiftedColumns = kSigned ? DType::kU8 : DType::kS8;

  static Vector MultiplyAdd(Vector acc, Lane row, Vector column) {
    return Dot(acc, (S32)_mm512_set1_epi32(row), column);
  }

  // As products of signed bytes: `row` must be small and positive, as Ones() is.
  static Vector Dot(Vector acc, Vector row, Vector column) {
    if constexpr (kSigned)
      return (S32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)row, (__m512i)column);
    return (S32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)column, (__m512i)row);
  }

  static Vector Ones() { return (S32)_mm512_set1_epi8(1); }

  static constexpr bool kSubtractsZeros = false;

  template <DType kType>
  static void LoadAlong(const uint8_t* from, Vector (&to)[1]) {
    LoadQuads<kType>(Load<S32>(from), to);
  }

  // 64 values of a line. Tiles take them in any order.
  template <DType kType>
  static void LoadTileRow(__m512i codes, Vector (&to)[1]) {
    LoadQuads<kType>((S32)codes, to);
  }

  template <DType kType>
  static void LoadQuads(S32 quads, Vector (&to)[1]) {
    constexpr int kShift = ShiftOf(kType, kShiftedColumns);
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(kShift));
    to[0] = (S32)_mm512_add_epi8((__m512i)quads, shift);
  }

  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    __m512i arranged[4], group[4];
    for (int j = 0; j < 4; ++j) {
      Vector bytes[1];
      LoadAlong<kType>(line[j], bytes);
      arranged[j] = DwordsToLanes((__m512i)bytes[0]);
    }
    Interleave(arranged, group);
    for (int v = 0; v < kVectors; ++v) column[v] = (S32)group[v];
  }

  // The stored byte of 0 after the shift.
  template <DType kType>
  static constexpr int kZeroCode = kType == kShiftedColumns ? 128 : 0;

  static void PackRow(const Operand& side, const Block& block, int64_t i, const uint8_t* from,
                      void* to, const Panel& panel) {
    const int shift = ShiftOf(side.dtype, kShiftedRows);
    const __m512i shifts = _mm512_set1_epi8(static_cast<char>(shift));
    const __m512i ones = _mm512_set1_epi8(1);
    auto* line = static_cast<uint8_t*>(to);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < block.depth; k += 64) {
      const int64_t left = std::min<int64_t>(block.depth - k, 64);
      const __mmask64 present = ~0ull >> (64 - left);
      const __m512i codes = _mm512_maskz_loadu_epi8(present, from + k);
      const __m512i values = _mm512_maskz_add_epi8(present, codes, shifts);
      _mm512_mask_storeu_epi8(line + k, ~0ull >> (64 - (left + 3) / 4 * 4), values);
      sum = _mm512_dpbusd_epi32(sum, ones, values);
    }
    panel.sum[i] += _mm512_reduce_add_epi32(sum);
  }
};

using Int8Quads = Int8QuadsOf<false>;       // by `vpdpbusd`
using SignedInt8Quads = Int8QuadsOf<true>;  // by tiles
static_assert(LanePolicy<Int8Quads> && LanePolicy<SignedInt8Quads>);

}  // namespace jaxfp8::JAXFP8_ISA
