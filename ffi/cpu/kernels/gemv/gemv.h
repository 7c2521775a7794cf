// GEMV and skinny M by unpacked columns, for any policy: by the layout of B.

#pragma once

#include "cpu/kernels/gemm/pack_and_multiply.h"
#include "cpu/kernels/gemv/gemv_kn.h"
#include "cpu/kernels/gemv/gemv_nk.h"

namespace jaxfp8::JAXFP8_ISA {

template <class Policy, DType kType, bool kSubtract, bool kSums>
void GemvOf(const Operand& side, const ChunkRun& run, int rows, const Panel& columns, void* acc,
            double* sums, int64_t pitch) {
  if (side.depth.Contiguous()) {
    GemvNk<Policy, kType, kSubtract, kSums>(side, run, rows, columns, acc).AddTo(sums, pitch);
    return;
  }
  WithCount<kGemvRows>(rows, [&]<int kCount> {
    GemvKnRun<Policy, kType, kCount, kSubtract, kSums>(side, run, columns, acc, sums, pitch);
  });
}

template <class Policy>
void Gemv(const Operand& side, const ChunkRun& run, int rows, const Panel& columns, void* acc,
          double* sums, int64_t pitch) {
  WithByteType<Policy>(side.dtype, [&]<DType kType>() {
    if constexpr (Policy::kExact) {
      if (run.blocks[0].sums) {
        return GemvOf<Policy, kType, false, true>(side, run, rows, columns, acc, sums, pitch);
      }
    }
    WithZeroPoints<Policy, kType>(side, [&]<bool kSubtract>() {
      GemvOf<Policy, kType, kSubtract, false>(side, run, rows, columns, acc, sums, pitch);
    });
  });
}

}  // namespace jaxfp8::JAXFP8_ISA
