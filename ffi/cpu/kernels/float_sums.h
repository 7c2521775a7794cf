// float32 sums of float32 panels: the universal path, for any mix of types, zero points included.

#ifndef JAXFP8_CPU_KERNELS_FLOAT_SUMS_H_
#define JAXFP8_CPU_KERNELS_FLOAT_SUMS_H_

#include "cpu/kernels/decode_line.h"
#include "cpu/kernels/pack.h"

namespace jaxfp8::JAXFP8_ISA {

// Takes the zero point off, and applies a scale that changes from value to value.
class ValueFactors {
 public:
  ValueFactors(const Side& side, const Block& block) : side_(side), block_(block) {}

  void AlongDepth(int64_t i, int64_t count, float* line) const {
    if (!Needed()) return;
    for (int64_t k = 0; k < count; ++k) line[k] = Apply(line[k], TileOf(side_, block_, i, k));
  }

  void AcrossDepth(int64_t k, int64_t count, float* line) const {
    if (!Needed()) return;
    for (int64_t i = 0; i < count; ++i) line[i] = Apply(line[i], TileOf(side_, block_, i, k));
  }

 private:
  bool Needed() const { return side_.zero_point || (side_.fine && side_.scale); }

  // A difference of two integers that float32 cannot hold is rounded once, from float64.
  float Apply(float value, int64_t tile) const {
    if (side_.zero_point) value = static_cast<float>(double{value} - side_.zero_point[tile]);
    return side_.fine && side_.scale ? value * side_.scale[tile] : value;
  }

  const Side& side_;
  const Block& block_;
};

struct FloatSums {
  using Vector = F32;
  using Lane = float;
  static constexpr int kGroup = 1;
  static constexpr bool kExact = false;

  static Vector Add(Vector sum, Lane row, Vector column) { return sum + row * column; }

  static Vector AddLanes(Vector sum, Vector row, Vector column) { return sum + row * column; }

  template <DType kType>
  static void Unpack(const uint8_t* from, Vector (&to)[kVectors]) {
    DecodeVectors<kType>(from, to);
  }

  template <DType kType>
  static void Spread(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    DecodeVectors<kType>(line[0], column);
  }

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackLine(const Side& side, const Block& block, Role, int64_t i, const uint8_t* from,
                       void* to, const Panel&) {
    auto* line = static_cast<float*>(to);
    DecodeLine(side.dtype, from, block.depth, line);
    ValueFactors(side, block).AlongDepth(i, block.depth, line);
  }

  static void PackAcross(const Side& side, const Block& block, Lines lines,
                         const Panel& panel) {
    const ValueFactors factors(side, block);
    auto* to = reinterpret_cast<float*>(panel.data);
    WithType(side.dtype,
             [&]<DType kType>() { PackStrip<FloatSums, kType>(lines, block, panel.data); });
    for (int64_t k = 0; k < block.depth; ++k) {
      factors.AcrossDepth(k, block.count, to + k * kColumns);
    }
  }
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_FLOAT_SUMS_H_
