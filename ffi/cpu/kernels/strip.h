// Columns side by side in memory, against few rows: lines across the depth are decoded in
// registers.

#ifndef JAXFP8_CPU_KERNELS_STRIP_H_
#define JAXFP8_CPU_KERNELS_STRIP_H_

#include "cpu/kernels/lines.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/tile.h"

namespace jaxfp8::JAXFP8_ISA {

// The lines of one group, padded where the block ends with what decodes to 0.
template <class Sums, DType kType>
class PaddedGroup {
 public:
  PaddedGroup(const Lines& lines, const Block& block, int64_t s, int64_t group) {
    std::memset(line_, Sums::template kZeroCode<kType>, sizeof line_);
    for (int j = 0; j < Sums::kGroup; ++j) {
      const int64_t k = group * Sums::kGroup + j;
      if (k < block.depth) std::memcpy(line_[j], lines[k] + s * kColumns, ColumnsOf(block, s));
    }
  }

  const uint8_t* operator[](int j) const { return line_[j]; }

 private:
  uint8_t line_[Sums::kGroup][kColumns];
};

// Sums of as many columns as are multiplied with few rows in one go.
template <class Sums, int kCount>
using Wide = Found<Sums>[kCount][kFewColumns];

// Where a strip's sums are found, the sums of its columns, and their zero points.
template <class Sums>
struct StripSums {
  Found<Sums>* found;  // rows kFewColumns apart
  int32_t* of_columns;
  const double* zero;
};

// Adds the products of kColumns columns with kCount rows over groups [first, last) of depth.
// `lines[g * kGroup + j]` is line j of group g; `Sums::Spread` turns the lines of a group into
// kVectors vectors of packed lanes. In a function of its own for the sake of registers.
template <class Sums, DType kType, int kCount, class Lines>
__attribute__((noinline)) void SumStrip(const Lines& lines, int64_t offset, int64_t first,
                                        int64_t last, const Panel& left, int64_t left_first,
                                        const StripSums<Sums>& sums) {
  using Vector = typename Sums::Vector;
  constexpr int kGroup = Sums::kGroup;
  Vector sum[kCount][kVectors];
  Vector totals[kVectors] = {};
  F32 zero[kVectors] = {};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (Sums::kLessZero) zero[v] = Zeros(sums.zero + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      sum[r][v] = Load<Vector>(sums.found + r * kFewColumns + v * kLanes);
    }
    if constexpr (Sums::kExact) totals[v] = Load<Vector>(sums.of_columns + v * kLanes);
  }
  for (int64_t g = first; g < last; ++g) {
    const uint8_t* line[kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) line[j] = lines[g * kGroup + j] + offset;
    Vector column[kVectors];
    Sums::template Spread<kType>(line, column);
    if constexpr (Sums::kLessZero) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) column[v] -= zero[v];
    }
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const auto row = Load<typename Sums::Lane>(left.data + r * left.pitch +
                                                 (left_first + g) * sizeof(int32_t));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Sums::Add(sum[r][v], row, column[v]);
    }
    if constexpr (Sums::kExact) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        totals[v] = Sums::AddLanes(totals[v], Sums::Ones(), column[v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      Store(sums.found + r * kFewColumns + v * kLanes, sum[r][v]);
    }
    if constexpr (Sums::kExact) Store(sums.of_columns + v * kLanes, totals[v]);
  }
}

// The sums of one strip over groups [first, last): as they lie in memory, then padded those that
// would reach beyond it.
template <class Sums, DType kType, int kCount>
void SumGroups(const Lines& lines, const Block& block, int64_t s, int64_t first, int64_t last,
               const Panel& left, const StripSums<Sums>& sums) {
  const int64_t width = ColumnsOf(block, s);
  const int64_t whole = lines.Readable(block.depth, width, kColumns) / Sums::kGroup;
  const int64_t border = std::clamp(whole, first, last);
  SumStrip<Sums, kType, kCount>(lines, s * kColumns, first, border, left, 0, sums);
  for (int64_t g = border; g < last; ++g) {
    const PaddedGroup<Sums, kType> padded(lines, block, s, g);
    SumStrip<Sums, kType, kCount>(padded, 0, 0, 1, left, g, sums);
  }
}

// The sums of a block. Few lines at a time, so that they are read from end to end.
template <class Sums, DType kType, int kCount>
void FindStrips(const Lines& lines, const Block& block, const Panel& left, const Panel& right,
                Wide<Sums, kCount>& found, int32_t (&of_columns)[kFewColumns]) {
  constexpr int64_t kLines = kLinesAhead / 2;
  constexpr int64_t kGroups = kLines / Sums::kGroup;
  const int64_t groups = (block.depth + Sums::kGroup - 1) / Sums::kGroup;
  for (int64_t first = 0; first < groups; first += kGroups) {
    const int64_t last = std::min(first + kGroups, groups);
    for (int64_t s = 0; s < Strips(block); ++s) {
      const int64_t first_column = s * kColumns;
      // Of the lines that come next, the same cache line.
      const bool begins = first_column % 64 == 0;
      const int64_t beyond = begins ? std::min((last + kGroups) * Sums::kGroup, block.depth) : 0;
      for (int64_t k = last * Sums::kGroup; k < beyond; ++k) {
        __builtin_prefetch(lines[k] + first_column, 0, 2);
      }
      SumGroups<Sums, kType, kCount>(
          lines, block, s, first, last, left,
          {found[0] + first_column, of_columns + first_column, right.zero + first_column});
    }
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_STRIP_H_
