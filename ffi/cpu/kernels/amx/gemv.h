// Skinny M by tiles, without packed columns.
//
//     B as [N, K]: amx/transposed.h
//     B as [K, N], up to kTile rows:
//       for each tile of lines, from end to end:   for each kNR columns:
//         B [32 lines][kNR] --pack--> micro-panel, one tile deep (L1) --> t0 .. t3 += A * panel
//       accumulators of all columns in L2

#pragma once

#include <algorithm>

#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/amx/transposed.h"

namespace jaxfp8::JAXFP8_ISA {

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
