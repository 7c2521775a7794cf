// The register tile of the first rows, which packs the columns for those that follow.
//
// Packing by itself waits for caches and memory; while it multiplies, a processor fetches and packs
// the next groups. So the weight is read a strip at a time, a cache line of each of many lines,
// which it does not foresee: they are asked for a strip ahead, by the tiles that follow.

#ifndef JAXFP8_CPU_KERNELS_GEMM_PACK_AND_MULTIPLY_H_
#define JAXFP8_CPU_KERNELS_GEMM_PACK_AND_MULTIPLY_H_

#include <algorithm>

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/operand/lines.h"

namespace jaxfp8::JAXFP8_ISA {

// The zero points of a strip, where sums want columns less theirs.
template <class Sums>
class ZeroPoints {
 public:
  explicit ZeroPoints(const double* zero) {
    for (int v = 0; Sums::kLessZero && v < kVectors; ++v) zero_[v] = Zeros(zero + v * kLanes);
  }

  // The columns of vector v less them.
  [[gnu::always_inline]] typename Sums::Vector Less(int v, typename Sums::Vector column) const {
    if constexpr (Sums::kLessZero) column -= zero_[v];
    return column;
  }

 private:
  F32 zero_[Sums::kLessZero ? kVectors : 1];
};

// The last byte of the next strip, or cache line, from this strip on: lines need not start where
// cache lines do, and this strip may end in that of the next one's first byte.
inline constexpr int kNextStrip = std::max(kColumns, 64) + 63;

// The columns of a strip from lines across the depth. They are packed to `to`, unless that is none;
// what lies `ahead` is asked for.
template <class Sums, DType kType>
class ColumnsOfLines {
 public:
  static constexpr int kGroups = 1;

  ColumnsOfLines(const Lines& lines, int64_t ahead, const double* zero, uint8_t* to)
      : zero_(zero), step_(lines[Sums::kGroup] - lines[0]), ahead_(ahead), to_(to) {
    for (int j = 0; j < Sums::kGroup; ++j) line_[j] = lines[j];
  }

  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(typename Sums::Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int j = 0; j < Sums::kGroup; ++j) __builtin_prefetch(line_[j] + ahead_, 0, 2);
    Sums::template Spread<kType>(line_, column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = zero_.Less(v, column[v]);
#pragma GCC unroll 4
    for (int j = 0; j < Sums::kGroup; ++j) line_[j] += step_;
    if (!to_) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, to_ += kBytes) Store(to_, column[v]);
  }

 private:
  ZeroPoints<Sums> zero_;
  const uint8_t* line_[Sums::kGroup];
  int64_t step_, ahead_;
  uint8_t* to_;
};

// The columns of a strip from quads of prepared ones, each of which is packed to `to` first.
template <class Sums, DType kType>
class ColumnsOfQuads {
 public:
  static constexpr int kGroups = kQuad / Sums::kGroup;

  ColumnsOfQuads(const uint8_t* from, int64_t pitch, const double* zero, uint8_t* to)
      : zero_(zero), from_(from), pitch_(pitch), to_(to), packed_(to) {}

  [[gnu::always_inline]] void Start() {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(from_ + kStreamAhead + v * kBytes);
      typename Sums::Vector part[kGroups];
      Sums::template SplitQuads<kType>(Load<S32>(from_ + v * kBytes), part);
#pragma GCC unroll 4
      for (int p = 0; p < kGroups; ++p) {
        Store(to_ + (p * kVectors + v) * kBytes, zero_.Less(v, part[p]));
      }
    }
    from_ += pitch_;
    to_ += kGroups * kVectors * kBytes;
  }

  [[gnu::always_inline]] void Next(typename Sums::Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, packed_ += kBytes) {
      column[v] = Load<typename Sums::Vector>(packed_);
    }
  }

 private:
  ZeroPoints<Sums> zero_;
  const uint8_t* from_;
  int64_t pitch_;
  uint8_t *to_, *packed_;
};

// The depth up to which a strip is taken as it lies: whole groups, and of lines those that can be
// read as wide as a strip, where it has fewer columns (what is found of the others is not used).
template <class Sums>
int64_t AsItLies(const Side& side, const Block& strip) {
  if (side.prepared || side.depth.Contiguous()) return strip.depth / kQuad * kQuad;
  const int64_t lines = strip.depth + strip.ahead;
  const int64_t readable = AcrossDepth(side, strip).Readable(lines, strip.count, kColumns);
  return std::min(readable, strip.depth) / Sums::kGroup * Sums::kGroup;
}

// Calls `multiply` with the columns of a strip, which they pack if rows follow.
template <class Sums, DType kType, class Function>
void WithColumns(const Side& side, const Block& strip, const Panel& panel, int64_t follow,
                 UpcomingLines& next, const Function& multiply) {
  using Quads = ColumnsOfQuads<Sums, kType>;
  if (side.prepared) {
    const uint8_t* from = PreparedAt(side, strip.batch, strip.first, strip.start);
    multiply(Quads(from, kQuadsPitch, panel.zero, panel.data));
  } else if (side.depth.Contiguous()) {
    TurnStrip<Sums, kType>(side, strip, panel.raw);
    multiply(Quads(panel.raw, kColumns * kQuad, panel.zero, panel.data));
  } else {
    const Lines lines = AcrossDepth(side, strip);
    uint8_t* to = follow > 0 || strip.sums ? panel.data : nullptr;
    const bool others_ask = follow >= kTilesThatAsk<Sums>;
    if (others_ask) next = {lines[0] + kNextStrip, lines[1] - lines[0], strip.depth};
    multiply(ColumnsOfLines<Sums, kType>(lines, others_ask ? 0 : kNextStrip, panel.zero, to));
  }
}

template <class Sums>
void PackAndMultiply(const Side& side, const Block& strip, const Panel& panel, int64_t follow,
                     const RowsOfTile& rows, void* found, int64_t pitch, bool first,
                     const NarrowSums* narrow, UpcomingLines& next) {
  const int64_t depth = AsItLies<Sums>(side, strip), rest = strip.depth - depth;
  if (depth > 0) {
    const Block part = StripOf(strip, 0, 0, depth);
    WithByteType<Sums>(side.dtype, [&]<DType kType>() {
      WithZero<Sums, kType>(side, [&]<class Less>() {
        WithColumns<Less, kType>(side, part, panel, follow, next, [&](const auto& columns) {
          MultiplyRows<Less>(rows, columns, depth, found, pitch, first, rest ? nullptr : narrow);
        });
      });
    });
  }
  if (rest > 0) {
    const Panel after = PanelOf(panel, 0, StripBytes<Sums>(depth));
    const uint8_t* from = rows.data + depth * (4 / Sums::kGroup);
    PackStripOf<Sums>(side, StripOf(strip, 0, depth, rest), after);
    UpcomingLines none{};
    Multiply<Sums>({from, rows.pitch, rows.count}, after.data, rest, found, pitch,
                   first && depth == 0, narrow, none);
  }
  AddColumnSums<Sums>(strip, panel);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMM_PACK_AND_MULTIPLY_H_
