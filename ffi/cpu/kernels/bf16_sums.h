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
  static constexpr int kDepth = 2048;  // adding sums up more often told; 256 KB, which L2 streams

  static Vector Add(Vector sum, Lane row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(row), (__m512bh)column);
  }

  static Vector AddLanes(Vector sum, Vector row, Vector column) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)column);
  }

  template <DType kType>
  static Vector Unpack(const uint8_t* from) {
    float values[2 * kLanes];
    DecodeRun<kType>(from, 2 * kLanes, values);
    return (F32)_mm512_cvtne2ps_pbh(Load<__m512>(values + kLanes), Load<__m512>(values));
  }

  template <DType kType>
  static void Spread(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    for (int v = 0; v < kVectors; ++v) {
      const __m512i even = _mm512_castps_si512(DecodeVector<kType>(line[0] + v * kLanes));
      const __m512i odd = _mm512_castps_si512(DecodeVector<kType>(line[1] + v * kLanes));
      column[v] = (F32)_mm512_or_si512(_mm512_and_si512(odd, upper), _mm512_srli_epi32(even, 16));
    }
  }

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackLine(const Side& side, const Block& block, Role, int64_t, const uint8_t* from,
                       void* to, const Panel&) {
    auto* line = static_cast<uint16_t*>(to);
    if (side.dtype == DType::kBF16) {
      std::memcpy(line, from, block.depth * sizeof(uint16_t));
    } else {
      float values[kDepth];
      for (int64_t start = 0; start < block.depth; start += kDepth) {
        const int64_t count = std::min<int64_t>(kDepth, block.depth - start);
        DecodeLine(side.dtype, from + start * SizeOf(side.dtype), count, values);
        for (int64_t k = 0; k < count; ++k) line[start + k] = UpperHalf(values[k]);
      }
    }
    if (block.depth % 2) line[block.depth] = 0;
  }

  static void PackAcross(const Side& side, const Block& block, const Lines& lines,
                         const Panel& panel) {
    auto* to = reinterpret_cast<uint32_t*>(panel.data);
    float even[kColumns] = {}, odd[kColumns] = {};
    for (int64_t k = 0; k < block.depth; k += 2, to += kColumns) {
      lines.Prefetch(k);
      lines.Prefetch(k + 1);
      DecodeLine(side.dtype, lines[k], block.count, even);
      if (k + 1 < block.depth) {
        DecodeLine(side.dtype, lines[k + 1], block.count, odd);
      } else {
        std::fill_n(odd, kColumns, 0.0f);
      }
      for (int i = 0; i < kColumns; ++i) {
        to[i] = (BitsOf(odd[i]) & 0xffff0000u) | BitsOf(even[i]) >> 16;
      }
    }
  }
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_BF16_SUMS_H_
