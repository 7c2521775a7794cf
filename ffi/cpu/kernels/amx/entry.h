// A row of the kernel table for tiles.

#pragma once

#include "cpu/kernels/amx/gemv.h"
#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/epilogue/epilogue.h"
#include "cpu/kernels/kernel.h"

namespace jaxfp8::JAXFP8_ISA {

template <class Policy>
constexpr Kernel TileEntry(const char* name, ComputeType compute) {
  constexpr bool kBytesAsTheyLie = Policy::kExact;
  return {
      .name = name,
      .needs = kAvx512 | kAvx512Vbmi | kAvx512Vnni | kAvx512Bf16 | kAmx,
      .compute = compute,
      // With fewer rows other kernels are as fast: memory or decoding is the limit.
      .min_rows = kBytesAsTheyLie ? MinRows{5, 5, 5} : MinRows{3, 2, 2},
      .packed = {.group = Policy::kGroup,
                 .size = 4 / Policy::kGroup,
                 .pad = kTile * Policy::kGroup,
                 .shifted_rows = Policy::kShiftedRows,
                 .shifted_columns = Policy::kShiftedColumns,
                 .subtracts_row_zeros = false},
      // The products of a tile are added up before they join the accumulators: few roundings.
      // Deeper panels leave L1: 12 to 48 rows of bfloat16 were 1.1 to 1.3x slower with 512.
      .gemm = {.mr = 2 * kTile,
               .nr = kNR,
               .tile_rows = kTile,
               .max_chunk = 4096,
               .panel_depth = 256,
               .row_bytes = 4 << 20,
               .sums_bytes = 2 << 20,
               .enter = EnterTiles,
               .leave = LeaveTiles,
               .pack_rows = PackTileRows<Policy>,
               .load_factors = LoadColumnFactors<Policy>,
               .pack_and_multiply = PackAndMultiplyTiles<Policy>,
               .multiply = MultiplyTiles<Policy>,
               .add_scaled = AddScaledRow<Policy>},
      // [K, N]: 3 to 8 rows of bfloat16 are 1.3 to 1.6x faster than with packed columns.
      // [N, K]: 48 to 128 rows are 1.4 to 1.6x faster. Rows are read again for every two tiles of
      // columns: they have to stay in an L2 of 2 MB.
      .gemv = {.kn_rows = kBytesAsTheyLie ? 0 : kTile / 2,
               .nk_rows = kTransposedRows,
               .nk_short_rows = 2 * kTile,
               .nk_depth_per_row = 1,
               .nk_float32_rows = 0,
               .prepared_rows = kBytesAsTheyLie ? 0 : kTile,
               .nk_pass_rows = kTransposedRows,
               .pass_rows = kTile,
               .spare_rows = kTile,
               .kn_float32 = false,
               .nk_float32 = true,
               .run_bytes = 7 << 18,
               .pack_rows_nk = PackTransposedRows<Policy>,
               .multiply = GemvByTiles<Policy>},
      .epilogue = {.store = StoreSums, .store_scaled = StoreScaled<Policy>},
  };
}

}  // namespace jaxfp8::JAXFP8_ISA
