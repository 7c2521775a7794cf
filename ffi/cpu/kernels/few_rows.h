// Few rows: columns are decoded in registers and used at once, so that the weight is read once and
// nothing is written but the sums. They may lie along the depth, or side by side across it.

#ifndef JAXFP8_CPU_KERNELS_FEW_ROWS_H_
#define JAXFP8_CPU_KERNELS_FEW_ROWS_H_

#include "cpu/kernels/pack.h"
#include "cpu/kernels/strip.h"
#include "cpu/kernels/tile.h"
#include "cpu/kernels/turn.h"

namespace jaxfp8::JAXFP8_ISA {

// The sums of the lanes of kLanes vectors.
template <typename Vector>
inline Vector SumsOfLanes(Vector (&of)[kLanes]) {
  // Each perfect shuffle of two vectors brings their halves together.
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      of[i] = __builtin_shuffle(of[i], of[i + half], kLowLanes) +
              __builtin_shuffle(of[i], of[i + half], kHighLanes);
    }
  }
  return of[0];
}

// Sums, and those of the columns themselves.
template <class Sums>
struct AndTotals : Sums {
  static constexpr bool kTotals = true;
};

// The products of one column along the depth with kCount rows; `Sums::Unpack` turns kColumns stored
// values into kParts vectors packed like a row's.
template <class Sums, DType kType, int kCount>
class Column {
 public:
  using Vector = typename Sums::Vector;
  static constexpr int kParts = kVectors / Sums::kGroup;
  static constexpr int kRowBytes = kParts * kBytes;  // of a packed row, for kColumns values

  explicit Column(double zero) : zero_(F32{} + static_cast<float>(zero)) {}

  void Multiply(const uint8_t* from, const Panel& left, int64_t depth) {
    const int64_t whole = depth / kColumns;
    int64_t v = 0;
    for (; v + 1 < whole; v += 2) {
      Add<0>(from + v * kColumns, left, v * kRowBytes);
      Add<kParts>(from + (v + 1) * kColumns, left, (v + 1) * kRowBytes);
    }
    if (v < whole) Add<0>(from + v * kColumns, left, v * kRowBytes);
    if (depth % kColumns)
      AddRest(from + whole * kColumns, depth % kColumns, left, whole * kRowBytes);
  }

  // Vectors whose lanes add up to the product with a row, and to the sum of the column.
  Vector Product(int row) const {
    Vector product = sum_[row][0] + sum_[row][1];
    if constexpr (kChains == 4) product += sum_[row][2] + sum_[row][3];
    return product;
  }
  Vector OfColumn() const { return of_column_; }

 private:
  // Of sums per row, which hide the latency of an addition: as there are registers for.
  static constexpr int kChains = kBytes == 64 ? 4 : 2;

  template <int kFirstChain>
  void Add(const uint8_t* from, const Panel& left, int64_t offset) {
    Vector column[kParts];
    Sums::template Unpack<kType>(from, column);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      if constexpr (Sums::kLessZero) column[p] -= zero_;
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const Vector row = Load<Vector>(left.data + r * left.pitch + offset + p * kBytes);
        Vector& sum = sum_[r][(kFirstChain + p) % kChains];
        sum = Sums::AddLanes(sum, row, column[p]);
      }
    }
    if constexpr (Sums::kTotals) {
      for (int p = 0; p < kParts; ++p) {
        of_column_ = Sums::AddLanes(of_column_, Sums::Ones(), column[p]);
      }
    }
  }

  // The end of a column that fills no vector, padded with what decodes to 0, against rows likewise.
  void AddRest(const uint8_t* from, int64_t count, const Panel& left, int64_t offset) {
    constexpr int kSize = 4 / Sums::kGroup;
    uint8_t rest[kColumns];
    std::memset(rest, Sums::template kZeroCode<kType>, kColumns);
    std::memcpy(rest, from, count);
    uint8_t rows[kCount][kRowBytes] = {};
    for (int r = 0; r < kCount; ++r) {
      std::memcpy(rows[r], left.data + r * left.pitch + offset, count * kSize);
    }
    Panel padded = left;
    padded.data = rows[0];
    padded.pitch = kRowBytes;
    Add<0>(rest, padded, 0);
  }

  Vector sum_[kCount][kChains] = {};
  Vector of_column_ = {};
  F32 zero_;
};

// The depth of columns along it that is summed in one go: as many rows as there may be stay in L1,
// and the bits of one do not depend on how many there are.
template <class Sums>
inline constexpr int64_t kPiece = (32 << 10) / kFewRows / (4 / Sums::kGroup) / kColumns * kColumns;

// Adds to found[row][column], and to the sums of the columns where they are wanted, for a depth of
// at most kPieces pieces.
template <class Sums, DType kType, int kCount, int kPieces>
void FindAlongPieces(const Side& side, const Block& block, const Panel& left, const Panel& right,
                     Wide<Sums, kCount>& found) {
  const Lines lines = AlongDepth(side, block);
  for (int64_t first = 0; first < block.count; first += kLanes) {
    typename Sums::Vector products[kPieces][kCount][kLanes] = {}, of_columns[kLanes] = {};
    for (int i = 0; i < std::min<int64_t>(kLanes, block.count - first); ++i) {
      const uint8_t* line = lines[first + i];
      // What follows is the same column of the next pieces, or the next column.
      for (int64_t k = 0; k < std::min<int64_t>(block.depth, 256); k += 64) {
        __builtin_prefetch(line + block.depth + k);
      }
      for (int p = 0; p < kPieces && p * kPiece<Sums> < block.depth; ++p) {
        const int64_t start = p * kPiece<Sums>;
        Panel rows = left;
        rows.data += start * (4 / Sums::kGroup);
        Column<Sums, kType, kCount> column(right.zero[first + i]);
        column.Multiply(line + start, rows, std::min(kPiece<Sums>, block.depth - start));
        for (int r = 0; r < kCount; ++r) products[p][r][i] = column.Product(r);
        of_columns[i] += column.OfColumn();
      }
    }
    for (int p = 0; p < kPieces; ++p) {
      for (int r = 0; r < kCount; ++r) {
        const auto sums = Load<typename Sums::Vector>(found[r] + first);
        Store(found[r] + first, sums + SumsOfLanes(products[p][r]));
      }
    }
    if constexpr (Sums::kTotals) {
      const auto sums = SumsOfLanes(of_columns);
      for (int i = 0; i < kLanes; ++i) right.sum[first + i] += sums[i];
    }
  }
}

// One row, or two, are in L1 as a whole: columns are read from end to end.
template <class Sums, DType kType, int kCount>
void FindAlong(const Side& side, const Block& block, const Panel& left, const Panel& right,
               Wide<Sums, kCount>& found) {
  constexpr int kPieces = kCount * 2 <= kFewRows && Sums::kGroup == 1 ? 2 : 1;
  constexpr int64_t kStep = kPieces * kPiece<Sums>;
  Block part = block;
  Panel rows = left;
  for (int64_t done = 0; done < block.depth; done += kStep) {
    part.start = block.start + done;
    part.depth = std::min(kStep, block.depth - done);
    rows.data = left.data + done * (4 / Sums::kGroup);
    FindAlongPieces<Sums, kType, kCount, kPieces>(side, part, rows, right, found);
  }
}

template <class Sums, DType kType, int kCount>
void FindAcross(const Side& side, const Block& block, const Panel& left, const Panel& right,
                Wide<Sums, kCount>& found) {
  int32_t of_columns[kFewColumns];
  if constexpr (Sums::kTotals) std::fill_n(of_columns, Strips(block) * kColumns, 0);
  if (side.prepared) {
    FindPrepared<Sums, kType, kCount>(side, block, left, right, found, of_columns);
  } else {
    const Lines lines = AcrossDepth(side, block);
    FindStrips<Sums, kType, kCount>(lines, block, left, right, found, of_columns);
  }
  if constexpr (Sums::kTotals) std::copy_n(of_columns, Strips(block) * kColumns, right.sum);
}

template <class Sums, DType kType, int kCount>
void MultiplyColumns(const Side& side, const Block& block, const Panel& left, const Panel& right,
                     void* room, double* sums, int64_t pitch, bool first) {
  const int64_t width = Strips(block) * kColumns;
  auto& found = *static_cast<Wide<Sums, kCount>*>(room);
  for (int r = 0; r < kCount; ++r) std::fill_n(found[r], width, Found<Sums>{});
  if (side.depth.Contiguous()) {
    FindAlong<Sums, kType, kCount>(side, block, left, right, found);
  } else {
    FindAcross<Sums, kType, kCount>(side, block, left, right, found);
  }
  for (int r = 0; r < kCount; ++r) {
    AddRow<Sums>(found[r], left, r, right, block.depth, width, sums + r * pitch, first);
  }
}

template <class Sums, DType kType>
void MultiplyFewOf(const Side& side, const Block& block, const Panel& left, int rows,
                   const Panel& right, void* found, double* sums, int64_t pitch, bool first) {
  switch (rows) {
    case 1:
      return MultiplyColumns<Sums, kType, 1>(side, block, left, right, found, sums, pitch, first);
    case 2:
      return MultiplyColumns<Sums, kType, 2>(side, block, left, right, found, sums, pitch, first);
    case 3:
      return MultiplyColumns<Sums, kType, 3>(side, block, left, right, found, sums, pitch, first);
    default:
      return MultiplyColumns<Sums, kType, kFewRows>(side, block, left, right, found, sums, pitch,
                                                    first);
  }
}

template <class Sums>
void MultiplyFew(const Side& side, const Block& block, const Panel& left, int rows,
                 const Panel& right, void* found, double* sums, int64_t pitch, bool first) {
  using LessZero = typename Sums::LessZero;
  StartColumns<Sums>(side, block, right);
  WithByteType<Sums>(side.dtype, [&]<DType kType>() {
    if constexpr (IsInt8(kType) && !std::is_void_v<LessZero>) {
      if (side.zero_point) {
        return MultiplyFewOf<LessZero, kType>(side, block, left, rows, right, found, sums, pitch,
                                              first);
      }
    }
    if constexpr (Sums::kExact) {
      if (block.sums) {
        return MultiplyFewOf<AndTotals<Sums>, kType>(side, block, left, rows, right, found, sums,
                                                     pitch, first);
      }
    }
    MultiplyFewOf<Sums, kType>(side, block, left, rows, right, found, sums, pitch, first);
  });
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_FEW_ROWS_H_
