// Columns along the depth against few rows: each is decoded in registers and read from end to end.

#ifndef JAXFP8_CPU_KERNELS_GEMV_GEMV_NK_H_
#define JAXFP8_CPU_KERNELS_GEMV_GEMV_NK_H_

#include <algorithm>
#include <utility>

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/operand/lines.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/simd/transpose.h"

namespace jaxfp8::JAXFP8_ISA {

// The lanes of a vector, those from `first` on before those before it.
template <int kFirst, int... kLane>
constexpr S32 Rotated(std::integer_sequence<int, kLane...>) {
  return S32{(kLane + kFirst) % kLanes...};
}

// The sums of the lanes of kOf vectors, in the first kOf lanes.
template <int kOf, typename Vector>
[[gnu::always_inline]] inline Vector SumsOfLanes(Vector (&of)[kOf]) {
  // Each perfect shuffle of two vectors brings their halves together.
#pragma GCC unroll 4
  for (int half = kOf / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      of[i] = __builtin_shuffle(of[i], of[i + half], kLowLanes) +
              __builtin_shuffle(of[i], of[i + half], kHighLanes);
    }
  }
  constexpr std::make_integer_sequence<int, kLanes> kEach;
  Vector sums = of[0];
  if constexpr (kOf < kLanes) sums += __builtin_shuffle(sums, Rotated<kLanes / 2>(kEach));
  if constexpr (2 * kOf < kLanes) sums += __builtin_shuffle(sums, Rotated<kLanes / 4>(kEach));
  static_assert(4 * kOf >= kLanes);
  return sums;
}

// Asks for what will be read, from `from` on, and past `end` what lies `jump` bytes beyond.
struct ReadAhead {
  [[gnu::always_inline]] void Request(int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) Prefetch(from + i, ask);
    from += bytes;
    if (from < end) return;
    from += jump;
    jump = 0;
  }

  const uint8_t *from, *end;
  int64_t jump;
  Ask ask;
};

// The same of several lines.
template <int kLines>
struct LinesAhead {
  [[gnu::always_inline]] void Request(int64_t bytes) {
#pragma GCC unroll 4
    for (ReadAhead& line : lines) line.Request(bytes);
  }

  ReadAhead lines[kLines];
};

// Copies `count` bytes, and fills what is left of kRoom. With masks, because it is done for every
// column of every block of scales that is no multiple of kColumns deep.
template <int kRoom>
inline void CopyPadded(const uint8_t* from, int64_t count, int fill, uint8_t* to) {
#if defined(__AVX512F__)
  static_assert(kRoom % kBytes == 0);
  const auto filling = _mm512_set1_epi8(static_cast<char>(fill));
#pragma GCC unroll 4
  for (int at = 0; at < kRoom; at += kBytes) {
    const int64_t left = std::clamp<int64_t>(count - at, 0, kBytes);
    const __mmask64 present = left > 0 ? ~0ull >> (kBytes - left) : 0;
    const auto values = (S32)_mm512_maskz_loadu_epi8(present, from + at);
    Store(to + at, values | (S32)_mm512_maskz_add_epi8(~present, filling, __m512i{}));
  }
#else
  std::memset(to, fill, kRoom);
  std::memcpy(to, from, count);
#endif
}

// The products of kTogether columns along the depth with kCount rows; `Sums::Unpack` turns kColumns
// values of kType into kParts vectors packed like a row's.
template <class Sums, DType kType, int kCount, int kTogether>
class ColumnsAlong {
 public:
  using Vector = typename Sums::Vector;
  using From = const uint8_t* const (&)[kTogether];
  static constexpr int kParts = kVectors / Sums::kGroup;
  static constexpr int kRowBytes = kParts * kBytes;  // of a packed row, for kColumns values
  static constexpr int kColumnBytes = kColumns * SizeOf(kType);

  // With packed rows, `pitch` bytes from one to the next.
  template <class Ahead>
  void Multiply(From from, const uint8_t* rows, int64_t pitch, int64_t depth, Ahead& ahead) {
    const int64_t whole = depth / kColumns;
    int64_t v = 0;
    for (; v + 1 < whole; v += 2) {
      ahead.Request(2 * kColumns);
      Add<0>(from, v * kColumnBytes, rows + v * kRowBytes, pitch);
      Add<kParts>(from, (v + 1) * kColumnBytes, rows + (v + 1) * kRowBytes, pitch);
    }
    if (depth == v * kColumns) return;
    ahead.Request(depth - v * kColumns);
    if (v < whole) Add<0>(from, v * kColumnBytes, rows + v * kRowBytes, pitch);
    if (depth % kColumns)
      AddRest(from, whole * kColumnBytes, depth % kColumns, rows + whole * kRowBytes, pitch);
  }

  void SetZero(int column, double zero) { zero_[column] = F32{} + static_cast<float>(zero); }

  // Vectors whose lanes add up to the product with a row, and to the sum of the column.
  Vector Product(int row, int column) const {
    Vector product = sum_[row][column][0];
    if constexpr (kChains > 1) product += sum_[row][column][1];
    if constexpr (kChains > 2) product += sum_[row][column][2] + sum_[row][column][3];
    return product;
  }
  Vector OfColumn(int column) const { return of_column_[column]; }

 private:
  // Of sums per row and column, which hide the latency of an addition: as there are registers for.
  static constexpr int kChains = std::max((kBytes == 64 ? 4 : 2) / kTogether, 1);

  template <int kFirstChain>
  void Add(From from, int64_t at, const uint8_t* rows, int64_t pitch) {
    Vector column[kTogether][kParts];
#pragma GCC unroll 4
    for (int c = 0; c < kTogether; ++c) {
      Sums::template Unpack<kType>(from[c] + at, column[c]);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        if constexpr (Sums::kLessZero) column[c][p] -= zero_[c];
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const Vector row = Load<Vector>(rows + r * pitch + p * kBytes);
#pragma GCC unroll 4
        for (int c = 0; c < kTogether; ++c) {
          Vector& sum = sum_[r][c][(kFirstChain + p) % kChains];
          sum = Sums::AddLanes(sum, row, column[c][p]);
        }
      }
      if constexpr (Sums::kTotals) {
#pragma GCC unroll 4
        for (int c = 0; c < kTogether; ++c) {
          of_column_[c] = Sums::AddLanes(of_column_[c], Sums::Ones(), column[c][p]);
        }
      }
    }
  }

  // The end of columns that fills no vector, padded with what decodes to 0, against rows likewise.
  void AddRest(From from, int64_t at, int64_t count, const uint8_t* rows, int64_t pitch) {
    constexpr int kSize = 4 / Sums::kGroup;
    uint8_t rest[kTogether][kColumnBytes], padded[kCount][kRowBytes];
    const uint8_t* rests[kTogether];
    for (int c = 0; c < kTogether; ++c) {
      CopyPadded<kColumnBytes>(from[c] + at, count * SizeOf(kType), Sums::template kZeroCode<kType>,
                               rest[c]);
      rests[c] = rest[c];
    }
    for (int r = 0; r < kCount; ++r) {
      CopyPadded<kRowBytes>(rows + r * pitch, count * kSize, 0, padded[r]);
    }
    Add<0>(rests, 0, padded[0], kRowBytes);
  }

  Vector sum_[kCount][kTogether][kChains] = {};
  Vector of_column_[kTogether] = {};
  F32 zero_[kTogether];
};

// The depth of columns along it that is summed in one go: as many rows as there may be stay in L1,
// and the bits of one do not depend on how many there are.
template <class Sums>
inline constexpr int64_t kPiece = (32 << 10) / kFewRows / (4 / Sums::kGroup) / kColumns * kColumns;

// A piece of a chunk of a run.
template <int kCount>
struct Piece {
  int64_t chunk;
  int64_t start;  // from that of the run on
  int64_t depth;
  const uint8_t* rows;  // packed, and
  int64_t pitch;        // bytes from one to the next
  float scale[kCount];  // of them
};

// The products of kCount rows with columns along the depth, at most kColumns of them, for the
// chunks of a run. Each column is read from end to end, as far as rows stay in L1: chunk by chunk,
// one row times e4m3 of 4096 x 14336 took 1.7 times as long (AMD Zen 5). Lanes are added up once
// for each piece, or where sums are narrow, once for all.
template <class Sums, DType kType, int kCount>
class RunAlong {
 public:
  // What is found of a chunk, for all of which there is room; of narrow sums what all are worth.
  static_assert(kRunChunks * kColumns <= kFewColumns);
  using FoundOf = Found<Sums>[kCount][kColumns];

  RunAlong(const Side& side, const ChunkRun& run, const Panel& right, FoundOf* found)
      : run_(run),
        right_(right),
        lines_(AlongDepth(side, run.blocks[0])),
        found_(found),
        narrow_(!Sums::kExact && run.narrow),
        // Narrow sums are the same for any count of rows.
        most_pieces_(narrow_ ? kRunChunks : kMostPieces),
        most_depth_(narrow_ ? kPiece<Sums> : kPiece<Sums> * kFewRows / kCount),
        ask_(run.blocks[0].ask),
        ahead_(AheadFor(ask_, kStreamAhead)) {
    std::memset(found, 0, (narrow_ ? 1 : run.count) * sizeof *found);
    for (int64_t c = 0; c < run.count; ++c) Start(side, run.blocks[c], c);
  }

  void Find() {
    for (int64_t c = 0; c < run_.count; ++c) {
      const Block& block = run_.blocks[c];
      for (int64_t done = 0; done < block.depth; done += kPiece<Sums>) {
        const int64_t depth = std::min(kPiece<Sums>, block.depth - done);
        if (count_ == most_pieces_ || depth_ + depth > most_depth_) FindPieces();
        const Panel& left = run_.left[c];
        Piece<kCount>& piece = pieces_[count_++];
        piece = {c,          block.start - run_.blocks[0].start + done,
                 depth,      left.data + done * (4 / Sums::kGroup),
                 left.pitch, {}};
        std::copy_n(left.scale, kCount, piece.scale);
        depth_ += depth;
      }
    }
    FindPieces();
  }

  void AddTo(double* sums, int64_t pitch) const {
    if (narrow_) return AddWorthTo(sums, pitch);
    for (int64_t c = 0; c < run_.count; ++c) {
      const Panel factors = PanelOf(right_, c, 0);
      for (int r = 0; r < kCount; ++r) {
        AddRow<Sums>(found_[c][r], run_.left[c], r, factors, run_.blocks[c].depth, kColumns,
                     sums + r * pitch, run_.first && c == 0);
      }
    }
  }

 private:
  using Vector = typename Sums::Vector;
  // Columns of narrow sums at a time.
  static constexpr int kTogether = 2;
  // Products take as much room as rows do in L1.
  static constexpr int kMostPieces = (32 << 10) / (kCount * kLanes * kBytes);

  // The factors of the columns of chunk c: for narrow sums in float32.
  void Start(const Side& side, const Block& block, int64_t c) {
    const Panel factors = PanelOf(right_, c, 0);
    const bool in_double = Sums::kLessZero || !narrow_;
    if (in_double) StartColumns<Sums>(side, block, factors);
    if (!narrow_) return;
    if (in_double) {
      std::copy_n(factors.scale, kColumns, scale_[c]);
    } else {
      Scales(side, block, kColumns, scale_[c]);
    }
  }

  void AddWorthTo(double* sums, int64_t pitch) const {
    for (int r = 0; r < kCount; ++r) {
      const Found<Sums>* worth = found_[0][r];
      double* to = sums + r * pitch;
      for (int i = 0; i < kColumns; ++i) to[i] = worth[i] + (run_.first ? 0 : to[i]);
    }
  }

  void FindPieces() {
    const Block& last = run_.blocks[run_.count - 1];
    const int64_t columns = last.count;
    const int64_t end = run_.blocks[0].start + pieces_[0].start + depth_;
    pitch_ = columns > 1 ? lines_[1] - lines_[0] : 0;
    const int64_t together = narrow_ ? kTogether : 1;
    columns_ahead_ = (1 + (ahead_ - 1) / depth_ / together) * together;
    to_next_pieces_ = end < last.start + last.depth + last.ahead ? depth_ - columns * pitch_ : 0;
    for (int64_t first = 0; first < columns; first += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, columns - first);
      if constexpr (!Sums::kExact) {
        if (narrow_) {
          FindNarrow(first, lanes);
          continue;
        }
      }
      FindLanes(first, lanes);
    }
    count_ = 0;
    depth_ = 0;
  }

  void FindLanes(int64_t first, int64_t columns) {
    for (int i = 0; i < columns; ++i) {
      const uint8_t* line = lines_[first + i];
      ReadAhead ahead = AheadOf(first + i, line);
      for (int p = 0; p < count_; ++p) {
        const Piece<kCount>& piece = pieces_[p];
        ColumnsAlong<Sums, kType, kCount, 1> column;
        column.SetZero(0, ZeroOf(piece, first + i));
        column.Multiply({line + piece.start}, piece.rows, piece.pitch, piece.depth, ahead);
        for (int r = 0; r < kCount; ++r) products_[p][r][i] = column.Product(r, 0);
        if constexpr (Sums::kTotals) totals_[p][i] = column.OfColumn(0);
      }
    }
    for (int p = 0; p < count_; ++p) AddUp(p, first, columns);
  }

  // Columns together share what a piece takes beside its products; where they end, the last again.
  void FindNarrow(int64_t first, int64_t columns) {
    auto& worth = products_[0];
    for (int64_t i = 0; i < columns; i += kTogether) {
      int64_t column[kTogether];
      const uint8_t* line[kTogether];
      LinesAhead<kTogether> ahead;
      Vector sum[kCount][kTogether] = {};
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        column[j] = first + std::min(i + j, columns - 1);
        line[j] = lines_[column[j]];
        ahead.lines[j] = AheadOf(column[j], line[j]);
      }
      for (int p = 0; p < count_; ++p) AddPiece(pieces_[p], column, line, ahead, sum);
      for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kTogether; ++j) worth[r][i + j] = sum[r][j];
      }
    }
    for (int r = 0; r < kCount; ++r) AddUp(worth[r], columns, found_[0][r] + first);
  }

  [[gnu::always_inline]] void AddPiece(const Piece<kCount>& piece,
                                       const int64_t (&column)[kTogether],
                                       const uint8_t* const (&line)[kTogether],
                                       LinesAhead<kTogether>& ahead,
                                       Vector (&sum)[kCount][kTogether]) {
    ColumnsAlong<Sums, kType, kCount, kTogether> together;
    const uint8_t* from[kTogether];
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      together.SetZero(j, ZeroOf(piece, column[j]));
      from[j] = line[j] + piece.start;
    }
    together.Multiply(from, piece.rows, piece.pitch, piece.depth, ahead);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        const F32 scaled = together.Product(r, j) * piece.scale[r];
        // Less 0 is free; plus 0 is an addition, because it makes 0 of -0.
        sum[r][j] = MultiplyAdd(scaled, scale_[piece.chunk][column[j]] - F32{}, sum[r][j]);
      }
    }
  }

  // After the pieces of a column come those of the next, and after those of the last column more of
  // the first, or where that is at its end, further columns.
  ReadAhead AheadOf(int64_t column, const uint8_t* line) const {
    const uint8_t* start = line + pieces_[0].start;
    const uint8_t* end = start + depth_;
    const uint8_t* next = start + columns_ahead_ * pitch_;
    if (column + columns_ahead_ >= run_.blocks[0].count) next += to_next_pieces_;
    if (depth_ > ahead_) return {start + ahead_, end, next - end, ask_};
    return {next, next, 0, ask_};
  }

  double ZeroOf(const Piece<kCount>& piece, int64_t column) const {
    return Sums::kLessZero ? right_.zero[piece.chunk * kColumns + column] : 0;
  }

  static void AddUp(Vector (&of)[kLanes], int64_t columns, Found<Sums>* sums) {
    Store(sums, Load<Vector>(sums) + SumsOfFirst(columns, of));
  }

  void AddUp(int p, int64_t first, int64_t columns) {
    const int64_t chunk = pieces_[p].chunk;
    for (int r = 0; r < kCount; ++r) AddUp(products_[p][r], columns, found_[chunk][r] + first);
    if constexpr (Sums::kTotals) {
      const Vector sums = SumsOfFirst(columns, totals_[p]);
      double* to = right_.sum + chunk * kColumns + first;
      for (int i = 0; i < columns; ++i) to[i] += sums[i];
    }
  }

  static Vector SumsOfFirst(int64_t columns, Vector (&of)[kLanes]) {
    for (int64_t i = columns; i < kLanes; ++i) of[i] = Vector{};
    return SumsOfLanes(of);
  }

  const ChunkRun& run_;
  const Panel& right_;
  const Lines lines_;
  FoundOf* found_;
  const bool narrow_;
  const int64_t most_pieces_, most_depth_;
  const Ask ask_;
  const int64_t ahead_;  // in bytes
  Piece<kCount> pieces_[std::max<int64_t>(kMostPieces, kRunChunks)];
  int count_ = 0;
  int64_t depth_ = 0;
  int64_t pitch_ = 0;                  // from column to column
  int64_t columns_ahead_ = 0;          // lies what is asked for
  int64_t to_next_pieces_ = 0;         // from the columns after the last to more depth of the first
  float scale_[kRunChunks][kColumns];  // of columns, where sums are narrow
  Vector products_[kMostPieces][kCount][kLanes];
  Vector totals_[Sums::kTotals ? kMostPieces : 1][kLanes];
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMV_GEMV_NK_H_
