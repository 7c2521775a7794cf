// float32 accumulators of float32 values: for any mix of types, zero points included.
//
//     lane:  | a[k] |     acc[lane] += a[k] * b[k][lane]

#pragma once

#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/policy/lane_policy.h"

namespace jaxfp8::JAXFP8_ISA {

// Subtracts zero points and applies scales varying from value to value (Operand::fine).
class ValueFactors {
 public:
  ValueFactors(const Operand& side, const Block& block) : side_(side), block_(block) {}

  bool Needed() const { return side_.fine; }

  void AlongDepth(int64_t i, int64_t count, float* line) const {
    Apply(side_.tile_free[block_.first + i], side_.tile_depth, block_.start, count, line);
  }

  void AcrossDepth(int64_t k, int64_t count, float* line) const {
    Apply(side_.tile_depth[block_.start + k], side_.tile_free, block_.first, count, line);
  }

 private:
  // For values with the tiles `tile` + `tiles[first + i]`. The compiler vectorises the loops.
  void Apply(int64_t tile, const Offsets& tiles, int64_t first, int64_t count, float* line) const {
    tile += side_.tile_batch[block_.batch];
    if (tiles.table) {
      const int64_t* table = tiles.table + first;
      ApplyEach(tile, [table](int64_t i) { return table[i]; }, count, line);
    } else if (tiles.Contiguous()) {
      ApplyEach(tile + first, [](int64_t i) { return i; }, count, line);
    } else if (tiles.Constant()) {
      ApplyEach(tile, [](int64_t) { return 0; }, count, line);
    } else {
      const int64_t stride = tiles.stride;
      ApplyEach(tile + first * stride, [stride](int64_t i) { return i * stride; }, count, line);
    }
  }

  template <typename Index>
  void ApplyEach(int64_t tile, const Index& index, int64_t count, float* __restrict line) const {
    if (side_.zero_point) {
      WithZeros(side_, [&](const auto* zeros) {
        const auto* zero = zeros + tile;
        for (int64_t i = 0; i < count; ++i) line[i] -= static_cast<float>(zero[index(i)]);
      });
    }
    if (side_.scale) {
      WithScales(side_, [&](auto scales) {
        const auto scale = scales + tile;
        for (int64_t i = 0; i < count; ++i) line[i] *= scale[index(i)];
      });
    }
  }

  const Operand& side_;
  const Block& block_;
};

struct Float32 {
  using Vector = F32;
  using Lane = float;
  static constexpr int kGroup = 1;
  static constexpr bool kExact = false;
  static constexpr DType kShiftedRows = DType::kNone, kShiftedColumns = DType::kNone;

  static Vector MultiplyAdd(Vector acc, Lane row, Vector column) { return acc + row * column; }

  static Vector Dot(Vector acc, Vector row, Vector column) { return acc + row * column; }

  static constexpr bool kSubtractsZeros = true;

  template <DType kType>
  static void LoadAlong(const uint8_t* from, Vector (&to)[kVectors]) {
    DecodeVectors<kType>(from, to);
  }

  template <DType kType>
  static void LoadQuads(S32 quads, Vector (&to)[kQuad]) {
    DecodeQuads<kType>(quads, to);
  }

  template <DType kType>
  static void LoadLines(const uint8_t* const (&line)[kGroup], Vector (&column)[kVectors]) {
    DecodeVectors<kType>(line[0], column);
  }

  template <DType>
  static constexpr int kZeroCode = 0;

  static void PackRow(const Operand& side, const Block& block, int64_t i, const uint8_t* from,
                      void* to, const Panel& panel) {
    auto* line = static_cast<float*>(to);
    DecodeLine(side.dtype, from, block.depth, line);
    const ValueFactors factors(side, block);
    if (factors.Needed()) return factors.AlongDepth(i, block.depth, line);
    if (!side.zero_point) return;
    const auto zero = static_cast<float>(panel.zero[i]);
    for (int64_t k = 0; k < block.depth; ++k) line[k] -= zero;
  }

  // To packed columns.
  static void ApplyFactors(const Operand& side, const Block& block, const Panel& panel) {
    auto* to = reinterpret_cast<float*>(panel.data);
    const ValueFactors factors(side, block);
    for (int64_t k = 0; factors.Needed() && k < block.depth; ++k) {
      factors.AcrossDepth(k, block.count, to + k * kNR);
    }
    if (side.zero_point && !factors.Needed()) TakeZeros(panel, block.depth);
  }

  static void TakeZeros(const Panel& panel, int64_t depth) {
    F32 zero[kVectors];
    for (int v = 0; v < kVectors; ++v) zero[v] = Zeros(panel.zero + v * kLanes);
    uint8_t* to = panel.data;
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v, to += kBytes) Store(to, Load<F32>(to) - zero[v]);
    }
  }
};

static_assert(LanePolicy<Float32>);

}  // namespace jaxfp8::JAXFP8_ISA
