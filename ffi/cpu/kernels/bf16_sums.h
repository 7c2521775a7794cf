// float32 sums of pairs of bfloat16 values by `vdpbf16ps`.
//
// bfloat16 holds every 8-bit value, subnormals of FP8 included, as a normal number. The instruction
// itself takes subnormal bfloat16 for 0: activations below 1.2e-38 do not count.

#ifndef JAXFP8_CPU_KERNELS_BF16_SUMS_H_
#define JAXFP8_CPU_KERNELS_BF16_SUMS_H_

#include "cpu/kernels/decode_line.h"
#include "cpu/kernels/pack.h"

namespace jaxfp8::JAXFP8_ISA {

// The upper half of a float32 is the bfloat16 of the same value, where one has it.
inline uint16_t UpperHalf(float value) { return static_cast<uint16_t>(BitsOf(value) >> 16); }

struct BF16Sums {
  using Vector = F32;
  using Lane = int32_t;
  static constexpr int kGroup = 2;
  static constexpr bool kExact = false;

  static Vector Add(Vector sum, Lane row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(row), (__m512bh)column);
  }

  static Vector AddLanes(Vector sum, Vector row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)column);
  }

  static constexpr bool kLessZero = false;
  using LessZero = void;

  template <DType kType>
  static void Unpack(const uint8_t* from, Vector (&to)[kVectors / kGroup]) {
    F32 value[kVectors];
    DecodeVectors<kType>(from, value);
    for (int i = 0; i < kVectors / kGroup; ++i) {
      to[i] = (F32)_mm512_cvtne2ps_pbh((__m512)value[2 * i + 1], (__m512)value[2 * i]);
    }
  }

  template <DType kType>
  static void Spread(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    F32 even[kVectors], odd[kVectors];
    DecodeVectors<kType>(line[0], even);
    DecodeVectors<kType>(line[1], odd);
    for (int v = 0; v < kVectors; ++v) {
      const __m512i high = _mm512_and_si512((__m512i)odd[v], upper);
      column[v] = (F32)_mm512_or_si512(high, _mm512_srli_epi32((__m512i)even[v], 16));
    }
  }

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackLine(const Side& side, const Block& block, Role, int64_t, const uint8_t* from,
                       void* to, const Panel&) {
    constexpr int64_t kRun = 512;
    auto* line = static_cast<uint16_t*>(to);
    if (side.dtype == DType::kBF16) {
      std::memcpy(line, from, block.depth * sizeof(uint16_t));
    } else {
      float values[kRun];
      for (int64_t start = 0; start < block.depth; start += kRun) {
        const int64_t count = std::min(kRun, block.depth - start);
        DecodeLine(side.dtype, from + start * SizeOf(side.dtype), count, values);
        for (int64_t k = 0; k < count; ++k) line[start + k] = UpperHalf(values[k]);
      }
    }
    if (block.depth % 2) line[block.depth] = 0;
  }

  static void PackAcross(const Side& side, const Block& block, Lines lines, const Panel& panel) {
    WithType(side.dtype,
             [&]<DType kType>() { PackStrip<BF16Sums, kType>(lines, block, panel.data); });
  }
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_BF16_SUMS_H_
