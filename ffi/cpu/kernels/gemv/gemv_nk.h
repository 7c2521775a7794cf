// GEMV and skinny M with [N, K] (K-contiguous B). Only the rows are packed.
//
//     A packed [M][K]        L1               B [N][K]     read once, in the order of memory
//     r0  a a a a a ...                       c0  b b b b b ...
//     r1  a a a a a ...                       c1  b b b b b ...    kTileColumns at a time
//
//     for each step of kNR values of K:
//       b = decode(c)                         in registers
//       acc[r][c] += a * b                    lane by lane: up to 16 vectors of accumulators
//     at the end of a piece of K: the lanes of each acc[r][c] are added up, a whole tile per pass
//
// Scaled sums of float32 are added lane by lane up to the end of K, step by step.
// More than kGemvRows rows take the columns of a tile again, out of L1.

#pragma once

#include <algorithm>

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemv/dot_tile.h"

namespace jaxfp8::JAXFP8_ISA {

// The products of packed rows and at most kNR columns for the chunks of a run. Columns are read
// from end to end as long as the rows stay in L1: chunk by chunk, one row was 1.7x slower with a
// scale per 128 of K (AMD Zen 5).
template <class Policy, DType kType, bool kSubtract, bool kSums>
class GemvNk {
 public:
  GemvNk(const Operand& side, const ChunkRun& run, int rows, const Panel& columns, void* acc)
      : run_(run),
        rows_(rows),
        passes_((rows + kGemvRows - 1) / kGemvRows),
        float32_(!Policy::kExact && run.float32),
        columns_(columns),
        lines_(AlongDepth(side, run.blocks[0])),
        pitch_(run.blocks[0].count > 1 ? lines_[1] - lines_[0] : 0),
        acc_(static_cast<Acc<Policy>*>(acc)) {
    std::memset(acc, 0, run.count * rows * kNR * sizeof *acc_);
    for (int64_t c = 0; c < run.count; ++c) {
      if (kSubtract || !float32_) {
        LoadColumnFactors<Policy>(side, run.blocks[c], FactorsFrom(columns, c * kNR));
      }
    }
    if (float32_) ScalesOfRun(side, run, scale_);
  }

  void AddTo(double* sums, int64_t pitch) {
    for (int64_t c = 0; c < run_.count; ++c) {
      for (int64_t done = 0; done < run_.blocks[c].depth; done += kPieceDepth) {
        if (count_ == kMaxPieces || bytes_ > kRowBytes - kPieceBytes * CachedRows()) {
          MultiplyPieces();
        }
        AddPiece(c, done, std::min(kPieceDepth, run_.blocks[c].depth - done));
      }
    }
    MultiplyPieces();
    if constexpr (!Policy::kExact) {
      if (float32_) {
        for (int64_t r = 0; r < rows_; ++r) {
          AddF32Row(AccOf(0, r), kNR, sums + r * pitch, run_.first);
        }
        return;
      }
    }
    for (int64_t c = 0; c < run_.count; ++c) {
      for (int64_t r = 0; r < rows_; ++r) {
        AddScaledRow<Policy>(AccOf(c, r), run_.rows[c], r, FactorsFrom(columns_, c * kNR),
                             run_.blocks[c].depth, kNR, sums + r * pitch, run_.first && c == 0);
      }
    }
  }

 private:
  // Rows of a pass over the columns take a half of a large L1. A piece is always as deep, so that
  // the bits of a row do not depend on the others.
  static constexpr int64_t kRowBytes = 32 << 10, kPieceBytes = 4 << 10, kMaxPieces = 64;
  static constexpr int64_t kPieceDepth = kPieceBytes / (4 / Policy::kGroup);

  // Part of a chunk.
  struct Piece {
    int64_t chunk, start, depth;  // from the start of the run
    const uint8_t* rows;
    int64_t pitch;
  };

  Acc<Policy>* AccOf(int64_t chunk, int64_t row) const {
    return acc_ + (chunk * rows_ + row) * kNR;
  }

  void AddPiece(int64_t c, int64_t done, int64_t depth) {
    const Panel& rows = run_.rows[c];
    const int64_t start = run_.blocks[c].start - run_.blocks[0].start + done;
    pieces_[count_++] = {c, start, depth, rows.data + done * (4 / Policy::kGroup), rows.pitch};
    bytes_ += depth * (4 / Policy::kGroup) * CachedRows();
  }

  // Multiplying a piece rounds float32 sums. The pieces must therefore not depend on the rows.
  int64_t CachedRows() const { return float32_ ? kGemvRows : rows_; }

  // Even passes: 6 rows are 3 + 3, not 4 + 2.
  int64_t FirstRow(int64_t pass) const { return rows_ * pass / passes_; }

  void MultiplyPieces() {
    const int64_t columns = run_.blocks[0].count;
    for (int64_t column = 0; column < columns; column += kStep) {
      for (int64_t pass = 0; pass < passes_; ++pass) {
        const int64_t row = FirstRow(pass);
        WithCount<kGemvRows>(FirstRow(pass + 1) - row, [&]<int kRowCount> {
          constexpr int kColumnCount = kTileColumns<kRowCount>;
          for (int64_t c = column; c < std::min(column + kStep, columns); c += kColumnCount) {
            if constexpr (!Policy::kExact) {
              if (float32_) {
                MultiplyTileF32<kRowCount>(row, c);
                continue;
              }
            }
            if constexpr (kSums) {
              if (pass > 0) {
                MultiplyTile<kRowCount, false>(row, c);
                continue;
              }
            }
            MultiplyTile<kRowCount, kSums>(row, c);
          }
        });
      }
    }
    count_ = bytes_ = 0;
  }

  // For the columns from `column` on.
  template <int kRowCount, bool kSumsToo>
  void MultiplyTile(int64_t row, int64_t column) {
    using Tile = DotTile<Policy, kType, kRowCount, kSubtract, kSumsToo>;
    for (int64_t p = 0; p < count_; ++p) {
      const Piece& piece = pieces_[p];
      const Panel factors = FactorsFrom(columns_, piece.chunk * kNR + column);
      const Tile tile = MultiplyPiece<Tile>(piece, row, column);
      const auto sums = tile.Sums();
      for (int r = 0; r < kRowCount; ++r) {
        Acc<Policy>* acc = AccOf(piece.chunk, row + r) + column;
        for (int c = 0; c < Tile::kColumnCount; ++c) acc[c] += sums[r * Tile::kColumnCount + c];
      }
      if constexpr (kSumsToo) {
        const auto totals = tile.ColumnSums();
        for (int c = 0; c < Tile::kColumnCount; ++c) factors.sum[c] += totals[c];
      }
    }
  }

  // The same, with the scaled sums of all pieces added in float32 before those of the lanes: lane
  // sums for each chunk made one row 1.2x slower with a scale per 128 of K (Xeon with AMX).
  template <int kRowCount>
  void MultiplyTileF32(int64_t row, int64_t column) {
    using Tile = DotTile<Policy, kType, kRowCount, kSubtract, false>;
    Tile whole;
    for (int64_t p = MultiplySteps(row, column, whole); p < count_; ++p) {
      const Piece& piece = pieces_[p];
      float scale[kRowCount];
      RowScales(piece.chunk, row, scale);
      const Tile tile = MultiplyPiece<Tile>(piece, row, column);
      tile.AddScaledTo(whole, scale, scale_[column] + piece.chunk);
    }
    const auto sums = whole.Sums();
    for (int r = 0; r < kRowCount; ++r) {
      Acc<Policy>* acc = AccOf(0, row + r) + column;
      for (int c = 0; c < Tile::kColumnCount; ++c) acc[c] += sums[r * Tile::kColumnCount + c];
    }
  }

  template <int kRowCount>
  void RowScales(int64_t chunk, int64_t row, float (&scale)[kRowCount]) const {
    for (int r = 0; r < kRowCount; ++r) {
      scale[r] = static_cast<float>(run_.rows[chunk].scale[row + r]);
    }
  }

  // Multiplies the first pieces, if each is whole steps or half a step. Returns the first of the
  // others. Piece by piece, one row was 3x slower with a scale per 32 of K, and 1.6x with one per
  // 128 (AMD Zen 4).
  template <class Tile>
  [[gnu::always_inline]] int64_t MultiplySteps(int64_t row, int64_t column, Tile& whole) const {
    if (AreSteps<1>(0)) return MultiplySteps<1>(row, column, whole);
    return AreSteps<2>(0) ? MultiplySteps<2>(row, column, whole) : 0;
  }

  // Whether the pieces from `p` on are whole steps, or those of one step. The last piece of a deep
  // chunk may be as short as a chunk, but its rows lie farther apart.
  template <int kChunks>
  bool AreSteps(int64_t p) const {
    if (kChunks == 1) return p < count_ && pieces_[p].depth % kNR == 0;
    const Piece& first = pieces_[p];
    return p + kChunks <= count_ && std::all_of(&first, &first + kChunks, [&](const Piece& piece) {
             return piece.depth * kChunks == kNR && piece.pitch == first.pitch;
           });
  }

  template <int kChunks, class Tile>
  [[gnu::always_inline]] int64_t MultiplySteps(int64_t row, int64_t column, Tile& to) const {
    Tile whole;  // in registers
    typename Tile::From from;
    LinesAt(column, pieces_[0].start, from);
    int64_t p = 0;
    for (; AreSteps<kChunks>(p); p += kChunks) {
      const Piece* pieces = &pieces_[p];
      const uint8_t* rows[kChunks];
      float scale[kChunks][Tile::kRows];
      for (int k = 0; k < kChunks; ++k) {
        rows[k] = pieces[k].rows + row * pieces[k].pitch;
        RowScales(pieces[k].chunk, row, scale[k]);
      }
      for (int64_t done = 0; done < pieces->depth; done += kNR / kChunks) {
        whole.template AddScaledStep<kChunks>(from, rows, pieces->pitch, scale,
                                              scale_[column] + pieces->chunk,
                                              columns_.zero + pieces->chunk * kNR + column);
        rows[0] += Tile::kRowBytes;
#pragma GCC unroll 4
        for (const uint8_t*& line : from) {
          if (row == 0) __builtin_prefetch(line + kStep * pitch_, 0, 2);
          line += kNR;
        }
      }
    }
    to = whole;
    return p;
  }

  // Past the end, the last column repeats.
  template <int kColumnCount>
  [[gnu::always_inline]] void LinesAt(int64_t column, int64_t start,
                                      const uint8_t* (&from)[kColumnCount]) const {
    const int64_t last = run_.blocks[0].count - 1;
    for (int c = 0; c < kColumnCount; ++c) from[c] = lines_[std::min(column + c, last)] + start;
  }

  template <class Tile>
  [[gnu::always_inline]] Tile MultiplyPiece(const Piece& piece, int64_t row, int64_t column) const {
    typename Tile::From from;
    LinesAt(column, piece.start, from);
    Tile tile(from, columns_.zero + piece.chunk * kNR + column);
    tile.Multiply(piece.rows + row * piece.pitch, piece.pitch, piece.depth,
                  row == 0 ? kStep * pitch_ : 0);
    return tile;
  }

  static constexpr int64_t kStep = kTileColumns<1>;  // columns taken by all rows in turn

  const ChunkRun& run_;
  const int64_t rows_, passes_;
  const bool float32_;  // whether scaled sums are added in float32
  const Panel& columns_;
  const Lines lines_;
  const int64_t pitch_;  // from column to column
  Acc<Policy>* acc_;
  Piece pieces_[kMaxPieces];
  int64_t count_ = 0, bytes_ = 0;
  float scale_[kNR][kMaxRunChunks];  // of the columns, for float32 sums
};

}  // namespace jaxfp8::JAXFP8_ISA
