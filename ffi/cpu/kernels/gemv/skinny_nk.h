// Columns along the depth against several rows, by tiles of both, the lanes of whose sums are added
// at the end, so that nothing is turned. Bytes are multiplied as they lie; what has to be decoded
// is so once, a few columns at a time, for all rows.

#ifndef JAXFP8_CPU_KERNELS_GEMV_SKINNY_NK_H_
#define JAXFP8_CPU_KERNELS_GEMV_SKINNY_NK_H_

#include <algorithm>
#include <bit>

#include "cpu/kernels/gemv/gemv_nk.h"

namespace jaxfp8::JAXFP8_ISA {

// Whether columns are multiplied as they lie.
template <class Sums>
inline constexpr bool kBytesAlong = Sums::kGroup == 4;

// Whether there are registers for it.
template <class Sums>
inline constexpr bool kByTilesAlong = kBytesAlong<Sums> || (kBytes == 64 && !Sums::kExact);

// How many rows are multiplied so. Fewer wait for memory, which is read fastest line by line: from
// there 2 and 3 of bytes took 1.1 to 1.2 times as long (AMD Zen 5), 5 to 8 of bfloat16 times e4m3
// 1.05 to 1.15 times, 9 of float32 as well (AMD Zen 4). More share the cost of packed columns,
// whose tiles are larger: 64 rows of bytes took 0.94 to 1.06 times as long otherwise (AMD Zen 5).
// Where columns have to be decoded, less depth does not pay for the ends of tiles: with 512, 32
// rows took 1.08 times as long (AMD Zen 4).
template <class Sums>
inline constexpr TilesOfFew kTilesAlong = {.least = 4, .most = 48, .depth = 0};
template <class Sums>
  requires(!kBytesAlong<Sums>)
inline constexpr TilesOfFew kTilesAlong<Sums> = {
    .least = Sums::kGroup == 2 ? 9 : 12, .most = 48, .depth = 768};

// Lines of a tile side by side.
inline constexpr int kAlongColumns = 4;

// Asks for kLines of the lines that are read next.
template <int kLines>
struct NextLines {
  [[gnu::always_inline]] void Request(int64_t bytes) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      for (int64_t i = 0; i < bytes; i += 64) Prefetch(from + line * pitch + i, ask);
    }
    from += bytes;
  }

  const uint8_t* from;
  int64_t pitch;
  Ask ask;
};

template <class Sums, DType kType>
class TilesAlong {
 public:
  static_assert(kByTilesAlong<Sums> && kAlongColumns * kFewRows <= kLanes);
  static_assert(kTilesAlong<Sums>.most <= kSlab);  // rows are packed in one go

  using Vector = typename Sums::Vector;  // whose lanes are the sums of a tile

  TilesAlong(const Side& side, const ChunkRun& run, int rows, const Panel& right, Vector* found)
      : side_(side),
        run_(run),
        rows_(rows),
        lots_((rows + kFewRows - 1) / kFewRows),
        right_(right),
        lines_(AlongDepth(side, run.blocks[0])),
        found_(found) {
    pitch_ = run.blocks[0].count > 1 ? lines_[1] - lines_[0] : 0;
  }

  void Find() {
    const int64_t columns = run_.blocks[0].count;
    for (int64_t c = 0; c < run_.count; ++c) {
      const int64_t depth = run_.blocks[c].depth, piece = PieceOf(depth);
      for (int64_t start = 0; start < depth; start += piece) {
        const int64_t end = std::min(start + piece, depth);
        for (int64_t i = 0; i < columns; i += kAlongColumns) FindColumns(c, start, end, i);
      }
    }
  }

  void AddTo(double* sums, int64_t pitch) const {
    for (int64_t c = 0; c < run_.count; ++c) {
      for (int64_t lot = 0; lot < lots_; ++lot) AddLot(c, lot, sums, pitch);
    }
  }

 private:
  typedef Found<Sums> Line __attribute__((vector_size(kAlongColumns * sizeof(Found<Sums>))));

  // Rows of a piece of a chunk stay in L1 where they are no more than 8, and packed columns; each
  // tile that ends costs as much as 300 bytes of its depth do.
  static constexpr int64_t kSize = 4 / Sums::kGroup;
  static constexpr int64_t kRoom = 16 << 10, kLeastPiece = kBytesAlong<Sums> ? 3072 : 4352;
  // The odd cache line keeps columns from falling on the same sets.
  static constexpr int64_t kPitch = kLeastPiece + 64;
  static_assert(kBytesAlong<Sums> || kRoom <= kLeastPiece * kTilesAlong<Sums>.least);

  // Columns of a piece of a chunk.
  struct Tile {
    int64_t chunk, start, depth, column;
    const uint8_t* from[kAlongColumns];
  };

  // Even pieces, of whole vectors.
  int64_t PieceOf(int64_t depth) const {
    const int64_t most = std::max(kRoom / rows_, kLeastPiece) / kSize;
    const int64_t pieces = (depth + most - 1) / most;
    return ((depth + pieces - 1) / pieces + kColumns - 1) / kColumns * kColumns;
  }

  // Even lots: 6 rows are 3 + 3, not 4 + 2.
  int64_t FirstRow(int64_t lot) const { return rows_ * lot / lots_; }

  Vector& FoundOf(int64_t chunk, int64_t column, int64_t lot) const {
    return found_[(chunk * kColumns + column) / kAlongColumns * lots_ + lot];
  }

  void AddLot(int64_t c, int64_t lot, double* sums, int64_t pitch) const {
    const Panel factors = PanelOf(right_, c, 0);
    for (int64_t row = FirstRow(lot); row < FirstRow(lot + 1); ++row) {
      Found<Sums> found[kColumns];
      for (int i = 0; i < kColumns; i += kAlongColumns) {
        const Vector& tile = FoundOf(c, i, lot);
        std::memcpy(found + i, reinterpret_cast<const Line*>(&tile) + row - FirstRow(lot),
                    sizeof(Line));
      }
      AddRow<Sums>(found, run_.left[c], row, factors, run_.blocks[c].depth, kColumns,
                   sums + row * pitch, run_.first && c == 0);
    }
  }

  // A piece of chunk `c` of the columns from `i` on; where they end, the last again.
  void FindColumns(int64_t c, int64_t start, int64_t end, int64_t i) {
    const Block& block = run_.blocks[c];
    const int64_t offset = block.start - run_.blocks[0].start + start;
    Tile tile{c, start, end - start, i, {}};
    for (int64_t j = 0; j < kAlongColumns; ++j) {
      const int64_t column = std::min(i + j, block.count - 1);
      const uint8_t* from = lines_[column] + offset;
      tile.from[j] = kBytesAlong<Sums> ? from : Packed(tile, column, from, packed_[j]);
    }
    const uint8_t* next = lines_[i] + offset + kAlongColumns * pitch_;
    if (i + kAlongColumns >= block.count) next += tile.depth - block.count * pitch_;
    for (int64_t lot = 0; lot < lots_; ++lot) {
      if constexpr (Sums::kExact) {
        if (lot == 0 && block.sums) {
          FindLot<AndTotals<Sums>>(tile, lot, next);
          continue;
        }
      }
      FindLot<Sums>(tile, lot, next);
    }
  }

  const uint8_t* Packed(const Tile& tile, int64_t column, const uint8_t* from, uint8_t* to) {
    Block piece = run_.blocks[tile.chunk];
    piece.start += tile.start;
    piece.depth = tile.depth;
    Sums::PackLine(side_, piece, column, from, to, PanelOf(right_, tile.chunk, 0));
    return to;
  }

  // What is read next, from `next` on, is asked for once: the first lots have a part of it each.
  template <class Parts>
  void FindLot(const Tile& tile, int64_t lot, const uint8_t* next) {
    constexpr int kHalf = kAlongColumns / 2;
    const Ask ask = run_.blocks[tile.chunk].ask;
    if (lots_ == 1) return FindTile<Parts>(tile, lot, NextLines<kAlongColumns>{next, pitch_, ask});
    if (lots_ >= kAlongColumns) {
      if (lot < kAlongColumns)
        return FindTile<Parts>(tile, lot, NextLines<1>{next + lot * pitch_, pitch_, ask});
    } else if (lot < 2) {
      return FindTile<Parts>(tile, lot, NextLines<kHalf>{next + lot * kHalf * pitch_, pitch_, ask});
    }
    FindTile<Parts>(tile, lot, NextLines<0>{next, pitch_, ask});
  }

  template <class Parts, class Ahead>
  void FindTile(const Tile& tile, int64_t lot, Ahead ahead) {
    const auto find = [&]<int kCount> { FindRows<Parts, kCount>(tile, lot, ahead); };
    WithCount<kFewRows>(FirstRow(lot + 1) - FirstRow(lot), find);
  }

  template <class Parts, int kCount, class Ahead>
  void FindRows(const Tile& tile, int64_t lot, Ahead ahead) {
    const int64_t row = FirstRow(lot);
    const Panel& left = run_.left[tile.chunk];
    ColumnsAlong<Parts, kType, kCount, kAlongColumns> columns;
    columns.Multiply(tile.from, left.data + row * left.pitch + tile.start * kSize, left.pitch,
                     tile.depth, ahead);
    constexpr int kOf = std::bit_ceil(unsigned{kCount}) * kAlongColumns;
    Vector products[kOf] = {};
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kAlongColumns; ++j)
        products[r * kAlongColumns + j] = columns.Product(r, j);
    }
    Vector& sums = FoundOf(tile.chunk, tile.column, lot);
    sums = SumsOfLanes(products) + (tile.start > 0 ? sums : Vector{});
    if constexpr (Parts::kTotals) {
      Vector totals[kAlongColumns];
#pragma GCC unroll 4
      for (int j = 0; j < kAlongColumns; ++j) totals[j] = columns.OfColumn(j);
      const Vector sums_of_columns = SumsOfLanes(totals);
      double* to = PanelOf(right_, tile.chunk, 0).sum + tile.column;
      for (int j = 0; j < kAlongColumns; ++j) to[j] += sums_of_columns[j];
    }
  }

  const Side& side_;
  const ChunkRun& run_;
  const int64_t rows_, lots_;
  const Panel& right_;
  const Lines lines_;
  Vector* found_;
  int64_t pitch_;  // from column to column
  alignas(kBytes) uint8_t packed_[kAlongColumns][kBytesAlong<Sums> ? 1 : kPitch];
};

template <class Sums, DType kType>
void MultiplyByTilesAlong(const Side& side, const ChunkRun& run, int rows, const Panel& right,
                          void* room, double* sums, int64_t pitch) {
  using Tiles = TilesAlong<Sums, kType>;
  Tiles tiles(side, run, rows, right, static_cast<typename Tiles::Vector*>(room));
  tiles.Find();
  tiles.AddTo(sums, pitch);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMV_SKINNY_NK_H_
