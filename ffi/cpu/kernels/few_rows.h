// Few rows: columns are decoded in registers and used at once, so that kFewRows rows read the
// weight once and nothing is written but the sums.

#ifndef JAXFP8_CPU_KERNELS_FEW_ROWS_H_
#define JAXFP8_CPU_KERNELS_FEW_ROWS_H_

#include "cpu/kernels/along.h"
#include "cpu/kernels/along_tiles.h"
#include "cpu/kernels/pack.h"
#include "cpu/kernels/strip.h"
#include "cpu/kernels/tile.h"

namespace jaxfp8::JAXFP8_ISA {

template <class Sums, DType kType, int kCount>
void FindAcross(const Side& side, const Block& block, const Panel& left, const Panel& right,
                FoundRows<Sums, kCount>& found) {
  int32_t of_columns[kFewColumns];
  if constexpr (Sums::kTotals && requires { typename Sums::template Parts<kCount>; }) {
    // Prepared columns are read for more of the depth in one go, which needs second parts oftener.
    if (!side.prepared) {
      typename Sums::template Parts<kCount> rows(left, block.depth);
      if (rows.Pay()) {
        return FindStrips<InTwo<typename Sums::Alone>, kType, kCount>(
            AcrossDepth(side, block), block, rows.WithFactorsOf(left), right, found, of_columns);
      }
    }
  }
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
void MultiplyAlong(const Side& side, const ChunkRun& run, const Panel& right, void* room,
                   double* sums, int64_t pitch) {
  auto* found = static_cast<typename RunAlong<Sums, kType, kCount>::FoundOf*>(room);
  RunAlong<Sums, kType, kCount> along(side, run, right, found);
  along.Find();
  along.AddTo(sums, pitch);
}

template <class Sums, DType kType, int kCount>
void MultiplyAcross(const Side& side, const ChunkRun& run, const Panel& right, void* room,
                    double* sums, int64_t pitch) {
  const Block& block = run.blocks[0];
  const int64_t width = Strips(block) * kColumns;
  auto& found = *static_cast<FoundRows<Sums, kCount>*>(room);
  for (int r = 0; r < kCount; ++r) std::fill_n(found[r], width, Found<Sums>{});
  FindAcross<Sums, kType, kCount>(side, block, run.left[0], right, found);
  for (int r = 0; r < kCount; ++r) {
    AddRow<Sums>(found[r], run.left[0], r, right, block.depth, width, sums + r * pitch, run.first);
  }
}

template <class Sums, DType kType>
void MultiplyFewOf(const Side& side, const ChunkRun& run, int rows, const Panel& right, void* found,
                   double* sums, int64_t pitch) {
  const auto multiply = [&]<int kCount>() {
    if (side.depth.Contiguous()) {
      MultiplyAlong<Sums, kType, kCount>(side, run, right, found, sums, pitch);
    } else {
      MultiplyAcross<Sums, kType, kCount>(side, run, right, found, sums, pitch);
    }
  };
  WithCount<kFewRows>(rows, multiply);
}

template <class Sums>
void MultiplyFew(const Side& side, const ChunkRun& run, int rows, const Panel& right, void* found,
                 double* sums, int64_t pitch) {
  for (int64_t c = 0; c < run.count; ++c) {
    StartColumns<Sums>(side, run.blocks[c], PanelOf(right, c, 0));
  }
  const bool by_tiles = side.depth.Contiguous() && rows >= kTilesAlong<Sums>.least;
  if constexpr (kByTilesAlong<Sums> && !kBytesAlong<Sums>) {
    if (by_tiles) {
      return MultiplyByTilesAlong<Sums, Sums::kPacked>(side, run, rows, right, found, sums, pitch);
    }
  }
  WithByteType<Sums>(side.dtype, [&]<DType kType>() {
    if constexpr (kBytesAlong<Sums>) {
      if (by_tiles) {
        return MultiplyByTilesAlong<Sums, kType>(side, run, rows, right, found, sums, pitch);
      }
    }
    if constexpr (Sums::kExact) {
      if (run.blocks[0].sums) {
        return MultiplyFewOf<AndTotals<Sums>, kType>(side, run, rows, right, found, sums, pitch);
      }
    }
    WithZero<Sums, kType>(side, [&]<class Less>() {
      MultiplyFewOf<Less, kType>(side, run, rows, right, found, sums, pitch);
    });
  });
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_FEW_ROWS_H_
