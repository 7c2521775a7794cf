// Rows of the kernel table for one shape of kernel.

#pragma once

#include "cpu/kernels/epilogue/epilogue.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemm/pack_and_multiply.h"
#include "cpu/kernels/gemv/gemv_kn.h"
#include "cpu/kernels/gemv/gemv_nk.h"
#include "cpu/kernels/kernel.h"

namespace jaxfp8::JAXFP8_ISA {

// GEMV and skinny M by unpacked columns, for any policy: by the layout of B.

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

template <LanePolicy Policy>
constexpr PackedFormat FormatOf() {
  return {
      .group = Policy::kGroup,
      .size = 4 / Policy::kGroup,
      .pad = Policy::kGroup,
      .shifted_rows = Policy::kShiftedRows,
      .shifted_columns = Policy::kShiftedColumns,
      .subtracts_row_zeros = requires { Policy::kSubtractsRowZeros; },
  };
}

// A panel 512 deep: with 1024, 16 rows of int8 from memory were 1.12x slower, with half an L1 full,
// up to 1.1x (AMD Zen 4).
template <class Policy>
constexpr GemmKernel GemmOf() {
  return {
      .mr = kMR,
      .nr = kNR,
      .tile_rows = 1,
      .max_chunk = Policy::kExact ? 4096 : 1024,
      .panel_depth = 512,
      .row_bytes = 1280 << 10,
      .sums_bytes = 256 << 10,
      .enter = nullptr,
      .leave = nullptr,
      .pack_rows = PackRows<Policy>,
      .load_factors = LoadColumnFactors<Policy>,
      .pack_and_multiply = PackAndMultiply<Policy>,
      .multiply = Multiply<Policy>,
      .add_scaled = AddScaledRow<Policy>,
  };
}

// Bytes need no decoding: with [N, K], 16 rows are 1.5x faster in place than packed, and 48 rows as
// fast. Other types are decoded again for every kGemvRows rows.
template <class Policy>
constexpr GemvKernel GemvOf() {
  constexpr bool kBytesAsTheyLie = Policy::kGroup == kQuad;
  return {
      .kn_rows = kGemvRows,
      .nk_rows = kBytesAsTheyLie ? 48 : 2 * kGemvRows,
      .nk_short_rows = 2,
      .nk_depth_per_row = kDepthPerRow,
      .nk_float32_rows = Policy::kExact ? 0
                         : kBytes == 64 ? 2 * kGemvRows
                                        : kGemvRows,
      .prepared_rows = 0,
      .nk_pass_rows = kBytesAsTheyLie ? 48 : 2 * kGemvRows,
      .pass_rows = kGemvRows,
      .spare_rows = 0,
      .kn_float32 = !Policy::kExact,
      .nk_float32 = !Policy::kExact,
      .run_bytes = 1280 << 10,
      .pack_rows_nk = PackRows<Policy>,
      .multiply = Gemv<Policy>,
  };
}

template <LanePolicy Policy>
constexpr Kernel Entry(const char* name, unsigned needs, ComputeType compute) {
  return {
      .name = name,
      .needs = needs,
      .compute = compute,
      .min_rows = {},
      .packed = FormatOf<Policy>(),
      .gemm = GemmOf<Policy>(),
      .gemv = GemvOf<Policy>(),
      .epilogue = {.store = StoreSums, .store_scaled = StoreScaled<Policy>},
  };
}

}  // namespace jaxfp8::JAXFP8_ISA
