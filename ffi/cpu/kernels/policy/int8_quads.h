// Exact int32 sums of groups of four bytes.
//
// `vpdpbusd` multiplies unsigned by signed bytes, so signed columns are shifted up by 128 and
// unsigned rows down by 128; where products of signed bytes are at hand, what is unsigned is
// shifted down. The shift joins the zero points, which the sums of the lines compensate. Those of
// rows are found once; those of columns are needed only if rows have a zero point or a shift, and
// few rows mostly do without (RowParts).

#ifndef JAXFP8_CPU_KERNELS_POLICY_INT8_QUADS_H_
#define JAXFP8_CPU_KERNELS_POLICY_INT8_QUADS_H_

#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemv/split_rows.h"

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
struct ByteSumsOf {
  using Vector = S32;
  using Lane = int32_t;
  static constexpr int kGroup = 4;
  static constexpr bool kExact = true;
  static constexpr bool kTotals = false;
  // Whose quads are groups as they lie, but for the shift.
  static constexpr DType kAsPrepared = DType::kS8;
  static constexpr DType kShiftedRows = DType::kU8;
  static constexpr DType kShiftedColumns = kSigned ? DType::kU8 : DType::kS8;

  static Vector Add(Vector sum, Lane row, Vector column) {
    return AddLanes(sum, (S32)_mm512_set1_epi32(row), column);
  }

  // With products of signed bytes, of rows that are ones.
  static Vector AddLanes(Vector sum, Vector row, Vector column) {
    if constexpr (kSigned)
      return (S32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)column);
    return (S32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)column, (__m512i)row);
  }

  static Vector Ones() { return (S32)_mm512_set1_epi8(1); }

  // Zero points are left to `AddRow`.
  static constexpr bool kLessZero = false;
  using LessZero = void;

  // Or taken off few rows.
  template <int kCount>
  using Parts = RowParts<kCount>;

  template <DType kType>
  static void Unpack(const uint8_t* from, Vector (&to)[1]) {
    SplitQuads<kType>(Load<S32>(from), to);
  }

  // 64 values of a line, which tiles take in any order.
  template <DType kType>
  static void UnpackByLanes(__m512i codes, Vector (&to)[1]) {
    SplitQuads<kType>((S32)codes, to);
  }

  template <DType kType>
  static void SplitQuads(S32 quads, Vector (&to)[1]) {
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(Shift(kType, Role::kColumn)));
    to[0] = (S32)_mm512_add_epi8((__m512i)quads, shift);
  }

  template <DType kType>
  static void Spread(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    SpreadAs<kType>(line, column, DwordsToLanes);
  }

  template <DType kType>
  static void SpreadByLanes(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    SpreadAs<kType>(line, column, AsTheyAre);
  }

  template <DType kType, class Arrange>
  [[gnu::always_inline]] static void SpreadAs(const uint8_t* const (&line)[kGroup],
                                              Vector (&column)[kVectors], Arrange arrange) {
    __m512i arranged[4], group[4];
    for (int j = 0; j < 4; ++j) {
      Vector bytes[1];
      Unpack<kType>(line[j], bytes);
      arranged[j] = arrange((__m512i)bytes[0]);
    }
    Interleave(arranged, group);
    for (int v = 0; v < kVectors; ++v) column[v] = (S32)group[v];
  }

  // The stored byte that the shift takes to 0.
  template <DType kType>
  static constexpr int kZeroCode = kType == kShiftedColumns ? 128 : 0;

  // What a value lacks to the range its role has in the instruction.
  static constexpr int Shift(DType type, Role role) {
    if (type != (role == Role::kRow ? kShiftedRows : kShiftedColumns)) return 0;
    return type == DType::kU8 ? -128 : 128;
  }

  // Of a row: columns of bytes are packed otherwise.
  static void PackLine(const Side& side, const Block& block, int64_t i, const uint8_t* from,
                       void* to, const Panel& panel) {
    const int shift = Shift(side.dtype, Role::kRow);
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

// For `vpdpbusd`, and for products of signed bytes.
using ByteSums = ByteSumsOf<false>;
using SignedByteSums = ByteSumsOf<true>;

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_POLICY_INT8_QUADS_H_
