// Few rows by tiles: a piece of a strip is packed and multiplied at once, before it leaves L1.

#ifndef JAXFP8_CPU_KERNELS_AMX_SKINNY_H_
#define JAXFP8_CPU_KERNELS_AMX_SKINNY_H_

#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/amx/transposed.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"

namespace jaxfp8::JAXFP8_ISA {

// The products of a block of columns with the rows of a tile, as low as there are rows. Where the
// sums of the columns are wanted and there is room, they are the product with one more row, of
// ones.
template <class Sums>
class FewTiles {
 public:
  FewTiles(const Side& side, const Block& block, const Panel& left, int rows, const Panel& right,
           Found<Sums>* found)
      : side_(side),
        block_(block),
        left_(left),
        rows_(rows),
        height_(rows),
        right_(right),
        found_(found) {
    if (!Sums::kExact || !block.sums || rows == kTile) return;
    std::memset(left.data + height_++ * left.pitch, 1, block.depth);
    block_.sums = false;
  }

  void Find() {
    EnterTiles(height_);
    if (InPlace()) {
      for (int64_t s = 0; s < Strips(block_); ++s) Multiply(s, 0, block_.depth, StripAt(s));
      if (block_.sums) SumColumns<Sums>(side_, block_, right_);
    } else if (side_.prepared) {
      for (int64_t s = 0; s < Strips(block_); ++s) FindStrip(s);
    } else {
      FindAcross();
    }
    LeaveTiles();
  }

  void AddTo(double* sums, int64_t pitch, bool first) const {
    for (int64_t s = 0; s < Strips(block_); ++s) {
      const Panel right = PanelOf(right_, s, 0);
      if (height_ > rows_) std::copy_n(FoundOf(s) + rows_ * kColumns, kColumns, right.sum);
      for (int r = 0; r < rows_; ++r) {
        AddRow<Sums>(FoundOf(s) + r * kColumns, left_, r, right, block_.depth, kColumns,
                     sums + r * pitch + s * kColumns, first);
      }
    }
  }

 private:
  // Lines side by side that are packed together: whole tiles.
  static constexpr int64_t kLines = kTile * Sums::kGroup;
  static constexpr int64_t kPiece = 128;  // or so much depth of prepared columns

  struct Packed {
    alignas(kBytes) uint8_t columns[kPiece * kColumns * (4 / Sums::kGroup)];
  };

  // Whether prepared columns are tiles as they lie.
  bool InPlace() const {
    return side_.prepared && side_.dtype == Sums::kAsPrepared &&
           block_.depth % (kTile * Sums::kGroup) == 0;
  }

  const uint8_t* StripAt(int64_t s) const {
    return PreparedAt(side_, block_.batch, block_.first + s * kColumns, block_.start);
  }

  const uint8_t* RowsAt(int64_t depth) const { return left_.data + depth * (4 / Sums::kGroup); }

  Found<Sums>* FoundOf(int64_t s) const { return found_ + s * kColumns * height_; }

  // One piece after the other, whose sums stay in tiles.
  void FindStrip(int64_t s) {
    Found<Sums>* found = FoundOf(s);
    LoadSums(found, found + 2 * kTile, kColumns * sizeof *found, true);
    for (int64_t k = 0; k < block_.depth; k += kPiece) {
      Packed packed;
      const int64_t depth = Pack(s, k, kPiece, packed);
      AddTileRow<Sums>(RowsAt(k), left_.pitch, packed.columns, Steps<Sums>(depth));
    }
    StoreSums(found, found + 2 * kTile, kColumns * sizeof *found);
  }

  // All columns of a few lines, so that these are read from end to end.
  void FindAcross() {
    for (int64_t k = 0; k < block_.depth; k += kLines) {
      for (int64_t s = 0; s < Strips(block_); ++s) {
        Packed packed;
        const int64_t depth = Pack(s, k, kLines, packed);
        Multiply(s, k, depth, packed.columns);
      }
    }
  }

  // At most `most` of the depth of a strip, from `start` on; returns how much.
  int64_t Pack(int64_t s, int64_t start, int64_t most, Packed& packed) {
    const Block piece = StripOf(block_, s, start, std::min(most, block_.depth - start));
    Panel panel = PanelOf(right_, s, 0);
    panel.data = packed.columns;
    PackTileStrip<Sums>(side_, piece, panel);
    AddColumnSums<Sums>(piece, panel);
    return piece.depth;
  }

  void Multiply(int64_t s, int64_t start, int64_t depth, const uint8_t* columns) {
    MultiplyTileRow<Sums>(RowsAt(start), left_.pitch, columns, Steps<Sums>(depth), FoundOf(s),
                          kColumns, start == 0);
  }

  const Side& side_;
  Block block_;
  const Panel& left_;
  int rows_, height_;
  const Panel& right_;
  Found<Sums>* found_;
};

template <class Sums>
void MultiplyFewByTiles(const Side& side, const ChunkRun& run, int rows, const Panel& right,
                        void* found, double* sums, int64_t pitch) {
  if (side.Along()) {
    return WithByteType<Sums>(side.dtype, [&]<DType kType>() {
      TurnedTiles<Sums, kType>(side, run, rows, right).AddTo(sums, pitch);
    });
  }
  for (int64_t c = 0; c < run.count; ++c) {
    const Block& block = run.blocks[c];
    StartColumns<Sums>(side, block, right);
    FewTiles<Sums> tiles(side, block, run.left[c], rows, right, static_cast<Found<Sums>*>(found));
    tiles.Find();
    tiles.AddTo(sums, pitch, run.first && c == 0);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_AMX_SKINNY_H_
