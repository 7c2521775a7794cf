// Skinny M with [N, K] (K-contiguous B), up to 128 rows, by tiles. The weight is not transposed.
//
//     A, transposed once when packed: 16 groups of K x up to 16 rows are a tile  (At)
//     B [N][K], 64 K values of 32 columns, decoded into lines: two tiles of 16 columns  (B0, B1)
//
//                 At0   At1      acc[column][row], in tiles 0 to 3
//         B0      t0    t2       the next piece of B is decoded while this one is multiplied
//         B1      t1    t3       more rows: the pieces stay in L1 until all have multiplied them
//
// At the end the accumulators are transposed back, or scaled and added in float32 untransposed.

#pragma once

#include <algorithm>
#include <bit>

#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/operand/lines.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/simd/transpose.h"

namespace jaxfp8::JAXFP8_ISA {

// K values of a piece of the columns: a cache line of each.
inline constexpr int64_t kTilePieceDepth = 64;

// The number of tiles for the packed values of a piece.
template <class Policy>
inline constexpr int kTilesPerPiece = kQuad / Policy::kGroup;

// The most rows of one call. Tiles are equally wide: one, or pairs of them.
inline constexpr int kTransposedRows = 128;
inline constexpr int kMaxTiles = kTransposedRows / kTile;
inline int TransposedTiles(int rows) {
  return rows > kTile ? (rows + 2 * kTile - 1) / (2 * kTile) * 2 : 1;
}
inline int WidthOf(int rows) {
  const int tiles = TransposedTiles(rows);
  return (rows + tiles - 1) / tiles;
}

// Lane g of row i of `from` becomes lane i of row g of a tile, the second one with `kSecond`.
// Values of two bytes are in the order of lanes: the lower halves of all four, then the upper ones.
template <class Policy, bool kSecond>
void TransposeRows(const uint8_t* from, int64_t pitch, int rows, int32_t* to) {
  constexpr S32 kLowerHalves = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  S32 lines[kLanes];
  for (int i = 0; i < kTile; ++i, from += pitch) {
    lines[i] = Load<S32>(from);
    if constexpr (kTilesPerPiece<Policy> == 2) {
      const auto second = Load<S32>(from + kBytes);
      lines[i] = __builtin_shuffle(lines[i], second, kLowerHalves + (kSecond ? 4 : 0));
    }
  }
  TransposeLanes(lines, to, rows, kTile);
}

// Packs transposed rows a tile at a time, each behind the last one. The order is ascending: a
// transposed tile ends in a whole vector, and this reaches beyond a narrow tile.
template <class Policy>
void PackTransposedRows(const Operand& side, const Block& block, const Panel& panel) {
  constexpr int64_t kSize = 4 / Policy::kGroup;
  const int64_t depth = (block.depth + kTilePieceDepth - 1) / kTilePieceDepth * kTilePieceDepth;
  const int rows = static_cast<int>(block.count);
  const int width = WidthOf(rows);
  for (int row = 0; row < rows; row += width) {
    Block tile = block;
    tile.first += row;
    tile.count = std::min(width, rows - row);
    Panel packed = FactorsFrom(panel, row);
    packed.data += TransposedTiles(rows) * width * panel.pitch;
    PackRows<Policy>(side, tile, packed);
    for (int i = 0; i < tile.count; ++i) {
      uint8_t* line = packed.data + i * panel.pitch;
      std::memset(line + block.depth * kSize, 0, (depth - block.depth) * kSize);
    }
    const uint8_t* from = packed.data;
    auto* to = reinterpret_cast<int32_t*>(panel.data + row * panel.pitch);
    for (int64_t k = 0; k < depth; k += kTilePieceDepth, from += kTilePieceDepth * kSize) {
      TransposeRows<Policy, false>(from, panel.pitch, width, to);
      to += kTile * width;
      if constexpr (kTilesPerPiece<Policy> == 2) {
        TransposeRows<Policy, true>(from, panel.pitch, width, to);
        to += kTile * width;
      }
    }
  }
}

// The products of a run of chunks of columns with at most kTransposedRows rows.
template <class Policy, DType kType>
class TransposedGemv {
 public:
  TransposedGemv(const Operand& side, const ChunkRun& run, int rows, const Panel& columns)
      : side_(side),
        run_(run),
        rows_(rows),
        tiles_(TransposedTiles(rows)),
        width_(WidthOf(rows)),
        columns_(columns),
        float32_(run.float32) {}

  void AddTo(double* sums, int64_t pitch) {
    EnterTransposedTiles(width_);
    for (int64_t c = 0; !float32_ && c < run_.count; ++c) {
      LoadColumnFactors<Policy>(side_, run_.blocks[c], FactorsFrom(columns_, c * kNR));
    }
    int64_t i = 0;
    for (; i < run_.blocks[0].count; i += kColumnsPerPass) {
      float32_ ? AddF32(i, sums + i, pitch) : AddColumns(i, sums + i, pitch);
    }
    // There are sums for whole micro-panels.
    for (int r = 0; run_.first && r < rows_; ++r) {
      std::fill(sums + r * pitch + i, sums + r * pitch + kNR, 0.0);
    }
    LeaveTiles();
  }

 private:
  // Two tiles: rows are read half as often, and a core can prefetch this many lines.
  static constexpr int kColumnsPerPass = 2 * kTile;
  static constexpr int64_t kPitch = kTilesPerPiece<Policy> * kBytes;
  // Accumulators of a tile of rows: a vector for each column, a lane for each row.
  using Accs = AccVector<Policy>[kColumnsPerPass];
  // Transposed back: by rows.
  template <typename T>
  using OfRows = T[kTransposedRows][kColumnsPerPass];

  // kTilePieceDepth of the columns.
  struct Piece {
    alignas(kBytes) uint8_t columns[kColumnsPerPass * kPitch];
  };

  // Pieces kept for further tiles of rows: a third of L1.
  static constexpr int64_t kPieces = (16 << 10) / sizeof(Piece);
  static constexpr int64_t kPiecesDepth = kPieces * kTilePieceDepth;
  static_assert(std::has_single_bit(uint64_t{kPieces}));

  // A tile of transposed rows; the next piece's tile lies a step further.
  struct Rows {
    const uint8_t* at;
    int64_t step;
  };

  // Columns of a chunk from `first` on. The last `kept` packed pieces are kept, a power of two.
  class Columns {
   public:
    Columns(const Operand& side, const Block& block, int64_t first, Piece* packed, int64_t kept)
        : count_(std::min<int64_t>(block.count - first, kColumnsPerPass)),
          depth_(block.depth),
          packed_(packed),
          last_(kept - 1) {
      const Lines lines = AlongDepth(side, block);
      for (int64_t i = 0; i < count_; ++i) line_[i] = lines[first + i];
    }

    uint8_t* At(int64_t k) const { return packed_[k / kTilePieceDepth & last_].columns; }

    // Packs the piece from k on, padded with 0.
    void Pack(int64_t k) const {
      const __mmask64 present = ~0ull >> (kTilePieceDepth - std::min(depth_ - k, kTilePieceDepth));
      const __m512i beyond = _mm512_maskz_mov_epi8(
          ~present, _mm512_set1_epi8(static_cast<char>(Policy::template kZeroCode<kType>)));
      uint8_t* to = At(k);
#pragma GCC unroll 4
      for (int64_t i = 0; i < count_; ++i, to += kPitch) {
        typename Policy::Vector part[kTilesPerPiece<Policy>];
        __m512i codes = _mm512_maskz_loadu_epi8(present, line_[i] + k);
        if constexpr (Policy::template kZeroCode<kType> != 0)
          codes = _mm512_or_si512(codes, beyond);
        Policy::template LoadTileRow<kType>(codes, part);
#pragma GCC unroll 2
        for (int t = 0; t < kTilesPerPiece<Policy>; ++t) Store(to + t * kBytes, part[t]);
      }
      if (count_ < kColumnsPerPass) std::memset(to, 0, (kColumnsPerPass - count_) * kPitch);
    }

   private:
    const int64_t count_, depth_;
    Piece* const packed_;
    const int64_t last_;
    const uint8_t* line_[kColumnsPerPass];
  };

  void AddColumns(int64_t first, double* sums, int64_t pitch) {
    for (int64_t c = 0; c < run_.count; ++c) {
      const Panel right = FactorsFrom(FactorsFrom(columns_, c * kNR), first);
      Accs acc[kMaxTiles];
      MultiplyChunk(c, first, acc, right.sum);
      OfRows<Acc<Policy>> of_row;
      TransposeBack(acc, of_row);
      for (int r = 0; r < rows_; ++r) {
        AddScaledRow<Policy>(of_row[r], run_.rows[c], r, right, run_.blocks[c].depth,
                             kColumnsPerPass, sums + r * pitch, run_.first && c == 0);
      }
    }
  }

  // The same in float32: the sums are added before they are transposed back.
  void AddF32(int64_t first, double* sums, int64_t pitch) {
    F32 sums_f32[kMaxTiles][kColumnsPerPass];
    std::memset(sums_f32, 0, tiles_ * sizeof *sums_f32);
    // Lanes outside every tile stay 0.
    Accs acc[kMaxTiles];
    std::memset(acc, 0, tiles_ * sizeof *acc);
    for (int64_t c = 0; c < run_.count; ++c) {
      Block block = run_.blocks[c];
      block.first += first;
      block.count = std::min<int64_t>(block.count - first, kColumnsPerPass);
      float scale[kColumnsPerPass];
      Scales(side_, block, kColumnsPerPass, scale);
      MultiplyChunk(c, first, acc, nullptr);
      for (int t = 0; t < tiles_; ++t) {
        const int row = t * width_;
        F32 of_rows = {};
        for (int r = 0; r < std::min(width_, rows_ - row); ++r) {
          of_rows[r] = static_cast<float>(run_.rows[c].scale[row + r]);
        }
        for (int i = 0; i < kColumnsPerPass; ++i) {
          const F32 value = __builtin_convertvector(acc[t][i], F32);
          sums_f32[t][i] = FusedMultiplyAdd(value, of_rows * scale[i], sums_f32[t][i]);
        }
      }
    }
    OfRows<float> of_row;
    TransposeBack(sums_f32, of_row);
    for (int r = 0; r < rows_; ++r) {
      double* to = sums + r * pitch;
      for (int i = 0; i < kColumnsPerPass; ++i) to[i] = of_row[r][i] + (run_.first ? 0 : to[i]);
    }
  }

  // The last tile may have fewer rows than it is wide.
  template <typename Vector, typename T>
  void TransposeBack(const Vector (*from)[kColumnsPerPass], OfRows<T>& to) const {
    for (int t = 0; t < tiles_; ++t) {
      for (int i = 0; i < kColumnsPerPass; i += kTile) {
        S32 lines[kLanes];
        std::memcpy(lines, from[t] + i, sizeof lines);
        TransposeLanes(lines, reinterpret_cast<int32_t*>(to[t * width_] + i), kColumnsPerPass,
                       width_);
      }
    }
  }

  // Multiplies a chunk by all rows. Sums of columns are products with a tile of ones.
  void MultiplyChunk(int64_t c, int64_t first, Accs* acc, double* sums) {
    const Block& block = run_.blocks[c];
    const bool ones = Policy::kExact && block.sums;
    const bool again = tiles_ > (ones ? 1 : 2);
    const Columns columns(side_, block, first, packed_, again ? kPieces : 2);
    const int64_t step = kTilesPerPiece<Policy> * kTile * width_ * sizeof(int32_t);
    const auto rows = [&](int64_t k, int tile) {
      const Panel& left = run_.rows[c];
      return Rows{left.data + tile * width_ * left.pitch + k / kTilePieceDepth * step, step};
    };
    Accs totals, none;
    for (int64_t k = 0, end; k < block.depth; k = end) {
      end = again ? std::min(k + kPiecesDepth, block.depth) : block.depth;
      if (tiles_ > 1) {
        MultiplyPieces<true, true>(columns, k, end, rows(k, 0), rows(k, 1), acc[0], acc[1]);
        for (int t = 2; t < tiles_; t += 2) {
          MultiplyPieces<true, false>(columns, k, end, rows(k, t), rows(k, t + 1), acc[t],
                                      acc[t + 1]);
        }
        if (ones) MultiplyPieces<false, false>(columns, k, end, Ones(), {}, totals, none);
      } else if (ones) {
        MultiplyPieces<true, true>(columns, k, end, rows(k, 0), Ones(), acc[0], totals);
      } else {
        MultiplyPieces<false, true>(columns, k, end, rows(k, 0), {}, acc[0], none);
      }
    }
    for (int i = 0; ones && i < kColumnsPerPass; ++i) sums[i] = totals[i][0];
  }

  static Rows Ones() {
    struct Tile {
      constexpr Tile() { std::fill_n(ones, kTile * kBytes, 1); }
      alignas(kBytes) uint8_t ones[kTile * kBytes];
    };
    static constexpr Tile kTileOfOnes;
    return {kTileOfOnes.ones, 0};
  }

  // Adds the products of a tile of rows from k on, and with `kBoth` of another one. With `kPack`
  // each piece is packed while the one before is multiplied.
  template <bool kBoth, bool kPack>
  void MultiplyPieces(const Columns& columns, int64_t k, int64_t end, Rows one, Rows other,
                      Accs& acc, Accs& beside) {
    LoadAccs(acc, beside, kBytes, k == 0);
    if (kPack) columns.Pack(k);
    for (; k < end; k += kTilePieceDepth, one.at += one.step, other.at += other.step) {
      AddTransposedTiles<Policy, kBoth>(columns.At(k), kPitch, one.at, other.at, width_);
      if (kPack && k + kTilePieceDepth < end) columns.Pack(k + kTilePieceDepth);
    }
    StoreAccs(acc, beside, kBytes);
  }

  const Operand& side_;
  const ChunkRun& run_;
  const int rows_, tiles_, width_;
  const Panel& columns_;
  const bool float32_;
  Piece packed_[kPieces];
};

// Skinny M by tiles, without packed columns.
//
//     B as [K, N], up to kTile rows:
//       for each tile of lines, from end to end:   for each kNR columns:
//         B [32 lines][kNR] --pack--> micro-panel, one tile deep (L1) --> t0 .. t3 += A * panel
//       accumulators of all columns in L2

template <class Policy>
class TileGemv {
 public:
  TileGemv(const Operand& side, const Block& block, const Panel& rows, int count,
           const Panel& columns, void* acc)
      : side_(side),
        block_(block),
        rows_(rows),
        count_(count),
        columns_(columns),
        acc_(static_cast<Acc<Policy>*>(acc)) {
    LoadColumnFactors<Policy>(side, block, columns);
  }

  void AddTo(double* sums, int64_t pitch, bool first) {
    EnterTiles(count_);
    if (side_.prepared) {
      for (int64_t c = 0; c < block_.count; c += kNR) Multiply(c, 0, block_.depth);
    } else {
      for (int64_t k = 0; k < block_.depth; k += kLines) {
        for (int64_t c = 0; c < block_.count; c += kNR) Multiply(c, k, kLines);
      }
    }
    LeaveTiles();
    for (int64_t c = 0; c < block_.count; c += kNR) {
      for (int r = 0; r < count_; ++r) {
        AddScaledRow<Policy>(AccOf(c) + r * kNR, rows_, r, FactorsFrom(columns_, c), block_.depth,
                             kNR, sums + r * pitch + c, first);
      }
    }
  }

 private:
  static constexpr int64_t kLines = kTile * Policy::kGroup;

  Acc<Policy>* AccOf(int64_t column) { return acc_ + column * count_; }

  // Columns from `column` on, and at most `depth` of K.
  void Multiply(int64_t column, int64_t k, int64_t depth) {
    alignas(kBytes) uint8_t packed[PanelBytes<Policy>(kLines)];
    Block block = PartOf(block_, k, std::min(depth, block_.depth - k));
    block.first += column;
    block.count = std::min<int64_t>(block.count - column, kNR);
    Panel panel = FactorsFrom(columns_, column);
    panel.data = packed;
    const PackedRows rows{rows_.data + k * (4 / Policy::kGroup), rows_.pitch, count_};
    PackAndMultiplyPieces<Policy>(side_, block, panel, false, rows, AccOf(column), kNR, k == 0);
  }

  const Operand& side_;
  const Block& block_;
  const Panel& rows_;
  const int count_;
  const Panel& columns_;
  Acc<Policy>* acc_;
};

template <class Policy>
void GemvByTiles(const Operand& side, const ChunkRun& run, int rows, const Panel& columns,
                 void* acc, double* sums, int64_t pitch) {
  if (side.Along()) {
    return WithByteType<Policy>(side.dtype, [&]<DType kType>() {
      TransposedGemv<Policy, kType>(side, run, rows, columns).AddTo(sums, pitch);
    });
  }
  for (int64_t c = 0; c < run.count; ++c) {
    TileGemv<Policy>(side, run.blocks[c], run.rows[c], rows, columns, acc)
        .AddTo(sums, pitch, run.first && c == 0);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA
