// Columns side by side in memory, against few rows: lines across the depth are decoded in
// registers.

#ifndef JAXFP8_CPU_KERNELS_STRIP_H_
#define JAXFP8_CPU_KERNELS_STRIP_H_

#include "cpu/kernels/lines.h"
#include "cpu/kernels/tile.h"

namespace jaxfp8::JAXFP8_ISA {

// The lines of one group, padded where the block ends with what decodes to 0.
template <class Sums, DType kType>
class PaddedGroup {
 public:
  PaddedGroup(const Lines& lines, const Block& block, int64_t group) {
    std::memset(line_, Sums::template kZeroCode<kType>, sizeof line_);
    for (int j = 0; j < Sums::kGroup; ++j) {
      const int64_t k = group * Sums::kGroup + j;
      if (k < block.depth) std::memcpy(line_[j], lines[k], block.count);
    }
  }

  const uint8_t* operator[](int j) const { return line_[j]; }

 private:
  uint8_t line_[Sums::kGroup][kColumns];
};

// Adds the products of kColumns columns with kCount rows over `count` groups of depth from `first`.
// `lines[g * kGroup + j]` is line j of group g; `Sums::Spread` turns the lines of a group into
// kVectors vectors of packed lanes. In a function of its own for the sake of registers.
template <class Sums, DType kType, int kCount, class Lines>
__attribute__((noinline)) void SumStrip(const Lines& lines, int64_t first, int64_t count,
                                        const Panel& left, Found<Sums> (&found)[kCount][kColumns],
                                        int32_t (&of_columns)[kColumns]) {
  using Vector = typename Sums::Vector;
  constexpr int kGroup = Sums::kGroup;
  constexpr int64_t kAhead = 32;  // lines, some 200 ns
  Vector sum[kCount][kVectors] = {};
  Vector totals[1][kVectors] = {};
  const int64_t last = count * kGroup - 1;
  for (int64_t g = 0; g < count; ++g) {
    const uint8_t* line[kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) {
      line[j] = lines[g * kGroup + j];
      // Each line is in a page of its own, where the processor does not look ahead.
      __builtin_prefetch(lines[std::min(g * kGroup + j + kAhead, last)]);
    }
    Vector column[kVectors];
    Sums::template Spread<kType>(line, column);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const auto row =
          Load<typename Sums::Lane>(left.data + r * left.pitch + (first + g) * sizeof(int32_t));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Sums::Add(sum[r][v], row, column[v]);
    }
    if constexpr (Sums::kExact) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        totals[0][v] = Sums::AddLanes(totals[0][v], Sums::Ones(), column[v]);
      }
    }
  }
  Found<Sums> part[kCount][kColumns];
  StoreTile<Sums, kCount>(sum, part);
  for (int r = 0; r < kCount; ++r) {
    for (int i = 0; i < kColumns; ++i) found[r][i] += part[r][i];
  }
  if constexpr (Sums::kExact) {
    Found<Sums> total[1][kColumns];
    StoreTile<Sums, 1>(totals, total);
    for (int i = 0; i < kColumns; ++i) of_columns[i] += total[0][i];
  }
}

// The sums of a whole strip: groups as they lie in memory, then those that have to be padded.
template <class Sums, DType kType, int kCount>
void FindStrip(const Lines& lines, const Block& block, const Panel& left,
               Found<Sums> (&found)[kCount][kColumns], int32_t (&of_columns)[kColumns]) {
  const int64_t groups = (block.depth + Sums::kGroup - 1) / Sums::kGroup;
  const int64_t whole = block.count == kColumns ? block.depth / Sums::kGroup : 0;
  if (whole > 0) SumStrip<Sums, kType, kCount>(lines, 0, whole, left, found, of_columns);
  for (int64_t g = whole; g < groups; ++g) {
    const PaddedGroup<Sums, kType> padded(lines, block, g);
    SumStrip<Sums, kType, kCount>(padded, g, 1, left, found, of_columns);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_STRIP_H_
