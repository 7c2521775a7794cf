// float32 accumulators of pairs of bfloat16 values, by `vdpbf16ps`.
//
//     lane:  | a[k] a[k+1] |     acc[lane] += a[k] * b[k][lane] + a[k+1] * b[k+1][lane]
//
// bfloat16 holds every 8-bit value, subnormals of FP8 included, as a normal number. The instruction
// itself takes subnormal bfloat16 for 0: activations below 1.2e-38 do not count.

#pragma once

#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/policy/lane_policy.h"

namespace jaxfp8::JAXFP8_ISA {

// Types with a lookup table for their bfloat16.
template <DType kType>
inline constexpr bool kLookedUp = IsFloat8(kType) || kType == DType::kS8;

struct Bf16Pairs {
  using Vector = F32;
  using Lane = int32_t;
  static constexpr int kGroup = 2;
  static constexpr bool kExact = false;
  static constexpr DType kShiftedRows = DType::kNone, kShiftedColumns = DType::kNone;

  static Vector MultiplyAdd(Vector acc, Lane row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(row), (__m512bh)column);
  }

  static Vector Dot(Vector acc, Vector row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)row, (__m512bh)column);
  }

  template <DType kType>
  static void LoadAlong(const uint8_t* from, Vector (&to)[kVectors / kGroup]) {
    if constexpr (kLookedUp<kType>) return LoadAlongLookedUp<kType>(from, to);
    F32 value[kVectors];
    DecodeVectors<kType>(from, value);
    for (int i = 0; i < kVectors / kGroup; ++i) {
      to[i] = (F32)_mm512_cvtne2ps_pbh((__m512)value[2 * i + 1], (__m512)value[2 * i]);
    }
  }

  // 64 values in the order of lanes: the lower halves of all four, then the upper ones.
  template <DType kType>
  [[gnu::always_inline]] static void LoadTileRow(__m512i codes, Vector (&to)[kQuad / kGroup]) {
    if constexpr (kLookedUp<kType>) {
      __m512i first, second;
      DecodeHalves<kType>(codes, first, second);
      to[0] = (F32)first;
      to[1] = (F32)second;
    } else {
      constexpr S32 kByLanes = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
      uint8_t by_lanes[kNR];
      Store(by_lanes, __builtin_shuffle((S32)codes, kByLanes));
      LoadAlong<kType>(by_lanes, to);
    }
  }

  template <DType kType>
  static void LoadQuads(S32 quads, Vector (&to)[kQuad / kGroup]) {
    if constexpr (kLookedUp<kType>) {
      __m512i first, second;
      PairsOfQuads<kType>((__m512i)quads, first, second);
      to[0] = (F32)first;
      to[1] = (F32)second;
    } else {
      F32 value[kQuad];
      DecodeQuads<kType>(quads, value);
      for (int i = 0; i < kQuad / kGroup; ++i) to[i] = Pairs(value[2 * i], value[2 * i + 1]);
    }
  }

  // Pairs of bfloat16, from values exact in bfloat16.
  static Vector Pairs(F32 even, F32 odd) {
    const __m512i high =
        _mm512_and_si512((__m512i)odd, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
    return (F32)_mm512_or_si512(high, _mm512_srli_epi32((__m512i)even, 16));
  }

  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    if constexpr (kLookedUp<kType>) return LoadLookedUp<kType>(line, column);
    F32 even[kVectors], odd[kVectors];
    DecodeVectors<kType>(line[0], even);
    DecodeVectors<kType>(line[1], odd);
    for (int v = 0; v < kVectors; ++v) column[v] = Pairs(even[v], odd[v]);
  }

  static constexpr bool kSubtractsZeros = false;

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackRow(const Operand& side, const Block& block, int64_t, const uint8_t* from,
                      void* to, const Panel&) {
    auto* line = static_cast<uint16_t*>(to);
    if (side.dtype == DType::kBF16) {
      std::memcpy(line, from, block.depth * sizeof(uint16_t));
    } else {
      WithType(side.dtype, [&]<DType kType>() {
        if constexpr (IsEightBit(kType)) DecodeRow<kType>(from, block.depth, line);
      });
    }
    if (block.depth % 2) line[block.depth] = 0;
  }

 private:
  // The two bytes of a value are looked up separately and interleaved.
  template <DType kType>
  static void LoadAlongLookedUp(const uint8_t* from, Vector (&to)[kVectors / kGroup]) {
    const __m512i in_turn = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    __m512i first, second;
    DecodeHalves<kType>(_mm512_permutexvar_epi32(in_turn, Load<__m512i>(from)), first, second);
    to[0] = (F32)first;
    to[1] = (F32)second;
  }

  template <DType kType>
  [[gnu::always_inline]] static void LoadLookedUp(const uint8_t* const (&line)[kGroup],
                                                  Vector (&column)[kVectors]) {
    const __m512i even = DwordsToLanes(Load<__m512i>(line[0]));
    const __m512i odd = DwordsToLanes(Load<__m512i>(line[1]));
    __m512i part[kVectors];
    DecodeHalves<kType>(_mm512_unpacklo_epi8(even, odd), part[0], part[1]);
    DecodeHalves<kType>(_mm512_unpackhi_epi8(even, odd), part[2], part[3]);
    for (int v = 0; v < kVectors; ++v) column[v] = (F32)part[v];
  }

  template <DType kType>
  static void DecodeRow(const uint8_t* from, int64_t count, uint16_t* to) {
    Vector values[kVectors / kGroup];
    int64_t k = 0;
    for (; k + kNR <= count; k += kNR) {
      LoadAlong<kType>(from + k, values);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors / kGroup; ++i) Store(to + k + i * 2 * kLanes, values[i]);
    }
    uint8_t rest[kNR] = {};
    std::memcpy(rest, from + k, count - k);
    LoadAlong<kType>(rest, values);
    std::memcpy(to + k, values, (count - k) * sizeof(uint16_t));
  }
};

static_assert(LanePolicy<Bf16Pairs>);

}  // namespace jaxfp8::JAXFP8_ISA
