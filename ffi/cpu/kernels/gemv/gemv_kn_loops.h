// Strips of columns against few rows: lines across the depth, of columns side by side, or quads of
// prepared ones are decoded in registers.

#ifndef JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_LOOPS_H_
#define JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_LOOPS_H_

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/operand/lines.h"

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

// Sums of rows in two parts: what is packed as rows kCount + r is added to row r.
template <class Sums>
struct InTwo : Sums {
  using OfFirst = Sums;
};

template <class Sums>
inline constexpr bool kInTwo = requires { typename Sums::OfFirst; };

// Whether the second parts of the rows of lines together are 0, from `rows` on.
template <int kCount>
bool IsFirstOnly(const uint8_t* rows, int64_t pitch) {
  uint64_t second = 0;
  static_assert(sizeof second == kLinesTogether);
  for (int r = kCount; r < 2 * kCount; ++r) second |= Load<uint64_t>(rows + r * pitch);
  return second == 0;
}

// Sums of as many columns as are multiplied with few rows in one go.
template <class Sums, int kCount>
using FoundRows = Found<Sums>[kCount][kFewColumns];

// Whether lines are spread by lanes, which is faster, and what is found put in order at the end.
template <class Sums, DType kType>
inline constexpr bool kByLanes = requires(const uint8_t* const (&line)[Sums::kGroup],
                                          typename Sums::Vector (&column)[kVectors]) {
  Sums::template SpreadByLanes<kType>(line, column);
};

// Where a strip's sums are found, the sums of its columns, and their zero points.
template <class Sums>
struct StripSums {
  Found<Sums>* found;  // rows kFewColumns apart
  int32_t* of_columns;
  const double* zero;
};

// The products of kWidth vectors of columns with kCount rows, in registers.
template <class Sums, int kCount, int kWidth = kVectors>
class StripTile {
 public:
  using Vector = typename Sums::Vector;

  [[gnu::always_inline]] explicit StripTile(const StripSums<Sums>& sums) {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
      if constexpr (Sums::kLessZero) zero_[v] = Zeros(sums.zero + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        sum_[r][v] = Load<Vector>(sums.found + r * kFewColumns + v * kLanes);
      }
      if constexpr (Sums::kTotals) total_[v] = Load<Vector>(sums.of_columns + v * kLanes);
    }
  }

  // Adds one group of the columns of vector v; `rows` has it of the first row.
  [[gnu::always_inline]] void Add(int v, Vector column, const uint8_t* rows, int64_t pitch) {
    if constexpr (Sums::kLessZero) column -= zero_[v];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      const auto row = Load<typename Sums::Lane>(rows + r * pitch);
      sum_[r][v] = Sums::Add(sum_[r][v], row, column);
      if constexpr (kInTwo<Sums>) {
        const auto more = Load<typename Sums::Lane>(rows + (kCount + r) * pitch);
        sum_[r][v] = Sums::Add(sum_[r][v], more, column);
      }
    }
    if constexpr (Sums::kTotals) total_[v] = Sums::AddLanes(total_[v], Sums::Ones(), column);
  }

  [[gnu::always_inline]] void StoreTo(const StripSums<Sums>& sums) const {
#pragma GCC unroll 4
    for (int v = 0; v < kWidth; ++v) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        Store(sums.found + r * kFewColumns + v * kLanes, sum_[r][v]);
      }
      if constexpr (Sums::kTotals) Store(sums.of_columns + v * kLanes, total_[v]);
    }
  }

 private:
  Vector sum_[kCount][kWidth];
  Vector total_[kWidth];
  F32 zero_[kWidth];
};

// Vectors of a strip that are summed in one go, as there are registers for: 3 and 4 rows took 1.2
// times as long by whole strips with AVX2 (AMD Zen 3).
template <int kCount>
inline constexpr int kSummedTogether = kBytes == 32 && kCount > 2 ? kVectors / 2 : kVectors;

// Adds the products over groups [first, last) of depth. `lines[g * kGroup + j]` is line j of group
// g; `Sums::Spread` turns the lines of a group into kVectors vectors of packed lanes. In a function
// of its own for the sake of registers.
template <class Sums, DType kType, int kCount, class Lines>
__attribute__((noinline)) void SumStrip(const Lines& lines, int64_t offset, int64_t first,
                                        int64_t last, const Panel& left, int64_t left_first,
                                        const StripSums<Sums>& sums) {
  constexpr int kGroup = Sums::kGroup;
  StripTile<Sums, kCount> tile(sums);
  for (int64_t g = first; g < last; ++g) {
    const uint8_t* line[kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) line[j] = lines[g * kGroup + j] + offset;
    typename Sums::Vector column[kVectors];
    Sums::template Spread<kType>(line, column);
    const uint8_t* rows = left.data + (left_first + g) * sizeof(int32_t);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) tile.Add(v, column[v], rows, left.pitch);
  }
  tile.StoreTo(sums);
}

// The sums of one strip over groups [first, last): as they lie in memory, then padded those that
// would reach beyond it.
template <class Sums, DType kType, int kCount>
void SumStripGroups(const Lines& lines, const Block& block, int64_t s, int64_t first, int64_t last,
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

// How much is decoded before it is multiplied, as there are registers for it: groups of lines, or
// vectors of quads. A processor looks too few operations ahead to multiply one while it decodes the
// next. (Lines with AVX2 otherwise: SumLines.)
template <int kCount>
inline constexpr int kDecodedAhead = kFewRows - kCount;

// The columns of group g of lines together, from byte `at` on.
template <class Sums, DType kType>
[[gnu::always_inline]] inline void Decode(const LinesTogether& lines, int g, int64_t at,
                                          typename Sums::Vector (&column)[kVectors]) {
  const uint8_t* line[Sums::kGroup];
#pragma GCC unroll 4
  for (int j = 0; j < Sums::kGroup; ++j) line[j] = lines.line[g * Sums::kGroup + j] + at;
  if constexpr (kByLanes<Sums, kType>) {
    static_assert(!Sums::kLessZero);
    Sums::template SpreadByLanes<kType>(line, column);
  } else {
    Sums::template Spread<kType>(line, column);
  }
}

// Adds the products of whole strips of lines together with kCount rows, packed from `rows` on. From
// a cache the processor fetches lines faster by itself, from memory it has to be asked: without,
// one row times e4m3 of 14336 x 4096 took 1.4 to 1.7 times as long, of 1024 x 1024 0.75 times (AMD
// Zen 5).
template <class Sums, DType kType, int kCount, Ask kAsk>
__attribute__((noinline)) void SumLines(const LinesTogether& lines, int64_t columns,
                                        const uint8_t* rows, int64_t pitch,
                                        const StripSums<Sums>& sums) {
  constexpr int kGroups = kLinesTogether / Sums::kGroup;
  constexpr int kWidth = kSummedTogether<kCount>;
  // The registers of AVX2 hold none: all groups are decoded into L1 first, or if that can be done
  // vector by vector, none.
  constexpr bool kInL1 = kBytes == 32 && kByLanes<Sums, kType>;
  constexpr int kInRegisters = kBytes == 32 ? 0 : std::min(kDecodedAhead<kCount>, kGroups - 1);
  constexpr int kAhead = kInL1 ? kGroups : kInRegisters;
  const int64_t ahead = std::min(AheadFor(kAsk, kLineAhead), columns);
  for (int64_t c = 0; c < columns; c += kColumns) {
    for (int k = 0; k < kLinesTogether && kAsk != Ask::kNone && c % 64 == 0; ++k) {
      lines.Request(k, c, ahead, columns, kAsk);
    }
    typename Sums::Vector column[kGroups][kVectors];
#pragma GCC unroll 4
    for (int first = 0; first < kVectors; first += kWidth) {
      const int64_t at = c + first * kLanes;
      const StripSums<Sums> strip = {sums.found + at, sums.of_columns + at, sums.zero + at};
      StripTile<Sums, kCount, kWidth> tile(strip);
#pragma GCC unroll 16
      for (int i = 0; i < kGroups + kAhead; ++i) {
        const bool decodes = i < kGroups && (first == 0 || !kInL1);
        if (decodes) Decode<Sums, kType>(lines, i, c, column[i]);
        const int g = i - kAhead;
#pragma GCC unroll 4
        for (int v = 0; g >= 0 && v < kWidth; ++v) {
          tile.Add(v, column[g][first + v], rows + g * sizeof(int32_t), pitch);
        }
      }
      tile.StoreTo(strip);
    }
  }
}

// The depth and the columns of a block that are summed by lines together, if any.
struct LinesOfBlock {
  explicit LinesOfBlock(const Block& block)
      : depth(block.depth / kLinesTogether * kLinesTogether),
        columns(depth > 0 ? block.count / kColumns * kColumns : 0) {}

  int64_t depth, columns;
};

// The sums of these, by lanes where kByLanes. Few lines at a time, so that they are read from end
// to end.
template <class Sums, DType kType, int kCount>
void FindLines(const Lines& lines, const Block& block, const Panel& left, const Panel& right,
               FoundRows<Sums, kCount>& found, int32_t (&of_columns)[kFewColumns]) {
  const LinesOfBlock whole(block);
  for (int64_t k = 0; k < whole.depth; k += kLinesTogether) {
    const uint8_t* rows = left.data + k * (4 / Sums::kGroup);
    const auto sum = [&]<class Parts> {
      WithAsk(block.ask, [&]<Ask kAsk> {
        SumLines<Parts, kType, kCount, kAsk>({lines, block, k}, whole.columns, rows, left.pitch,
                                             {found[0], of_columns, right.zero});
      });
    };
    if constexpr (kInTwo<Sums>) {
      if (IsFirstOnly<kCount>(rows, left.pitch)) {
        sum.template operator()<typename Sums::OfFirst>();
        continue;
      }
    }
    sum.template operator()<Sums>();
  }
}

// Adds the products of a strip of prepared columns with kCount rows, packed from `rows` on.
template <class Sums, DType kType, int kCount>
__attribute__((noinline)) void SumQuads(const uint8_t* from, int64_t quads, const uint8_t* rows,
                                        int64_t pitch, const StripSums<Sums>& sums) {
  constexpr int kParts = kQuad / Sums::kGroup;
  constexpr int kWidth = kSummedTogether<kCount>;
  constexpr int kAhead = std::min(kDecodedAhead<kCount>, kWidth - 1);
  StripTile<Sums, kCount, kWidth> tile(sums);
  for (int64_t q = 0; q < quads; ++q, from += kQuadsPitch, rows += kParts * sizeof(int32_t)) {
    typename Sums::Vector part[kWidth][kParts];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth + kAhead; ++i) {
      if (i < kWidth) {
        __builtin_prefetch(from + kStreamAhead + i * kBytes);
        Sums::template SplitQuads<kType>(Load<S32>(from + i * kBytes), part[i]);
      }
      const int v = i - kAhead;
#pragma GCC unroll 4
      for (int p = 0; v >= 0 && p < kParts; ++p) {
        tile.Add(v, part[v][p], rows + p * sizeof(int32_t), pitch);
      }
    }
  }
  tile.StoreTo(sums);
}

// The sums of a block of prepared columns. So few quads at a time that they stay in L1 where they
// are of several strips.
template <class Sums, DType kType, int kCount>
void FindPrepared(const Side& side, const Block& block, const Panel& left, const Panel& right,
                  FoundRows<Sums, kCount>& found, int32_t (&of_columns)[kFewColumns]) {
  constexpr int64_t kQuads = (16 << 10) / kQuadsPitch;
  const int64_t quads = block.depth / kQuad;
  for (int64_t start = 0; start < quads; start += kQuads) {
    const uint8_t* rows = left.data + start * kQuad * (4 / Sums::kGroup);
    for (int64_t i = 0; i < Strips(block) * kColumns; i += kSummedTogether<kCount> * kLanes) {
      const uint8_t* from =
          PreparedAt(side, block.batch, block.first + i, block.start + start * kQuad);
      SumQuads<Sums, kType, kCount>(from, std::min(kQuads, quads - start), rows, left.pitch,
                                    {found[0] + i, of_columns + i, right.zero + i});
    }
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_LOOPS_H_
