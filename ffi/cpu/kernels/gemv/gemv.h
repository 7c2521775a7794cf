// Few rows: columns are decoded in registers and used at once, so that kFewRows rows read the
// weight once and nothing is written but the sums.

#ifndef JAXFP8_CPU_KERNELS_GEMV_GEMV_H_
#define JAXFP8_CPU_KERNELS_GEMV_GEMV_H_

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemv/gemv_kn.h"
#include "cpu/kernels/gemv/gemv_nk.h"
#include "cpu/kernels/gemv/skinny_nk.h"

namespace jaxfp8::JAXFP8_ISA {

template <class Sums, DType kType, int kCount>
void MultiplyAlong(const Side& side, const ChunkRun& run, const Panel& right, void* room,
                   double* sums, int64_t pitch) {
  auto* found = static_cast<typename RunAlong<Sums, kType, kCount>::FoundOf*>(room);
  RunAlong<Sums, kType, kCount> along(side, run, right, found);
  along.Find();
  along.AddTo(sums, pitch);
}

template <class Sums, DType kType>
void MultiplyFewOf(const Side& side, const ChunkRun& run, int rows, const Panel& right, void* found,
                   double* sums, int64_t pitch) {
  const auto multiply = [&]<int kCount>() {
    if (side.depth.Contiguous()) {
      MultiplyAlong<Sums, kType, kCount>(side, run, right, found, sums, pitch);
    } else {
      RunAcross<Sums, kType, kCount>(side, run, right, found).AddTo(sums, pitch);
    }
  };
  WithCount<kFewRows>(rows, multiply);
}

template <class Sums>
void MultiplyFew(const Side& side, const ChunkRun& run, int rows, const Panel& right, void* found,
                 double* sums, int64_t pitch) {
  const bool by_tiles = side.depth.Contiguous() && rows >= kTilesAlong<Sums>.least;
  for (int64_t c = 0; by_tiles && c < run.count; ++c) {
    StartColumns<Sums>(side, run.blocks[c], PanelOf(right, c, 0));
  }
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

#endif  // JAXFP8_CPU_KERNELS_GEMV_GEMV_H_
