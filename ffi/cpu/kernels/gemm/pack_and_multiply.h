// Packing fused with the first tile of rows.
//
//     for each group of K:   B in memory --decode--> b[kVectors] --> acc of the first tile of rows
//                                                         \-store-> packed micro-panel (L1)
//     other tiles of rows:   the packed micro-panel, by the micro-kernel
//
// Packing is memory-bound and multiplying compute-bound, so one loop does both: 5 to 16 rows are
// 1.2 to 1.3x faster than with a pass for each (AMD Zen 4).

#pragma once

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"

namespace jaxfp8::JAXFP8_ISA {

// Calls `function` with a constant: whether packing subtracts the type's zero points.
template <class Policy, DType kType, class Function>
void WithZeroPoints(const Operand& side, const Function& function) {
  if constexpr (IsInt8(kType) && Policy::kSubtractsZeros) {
    if (side.zero_point) return function.template operator()<true>();
  }
  function.template operator()<false>();
}

// K values of the block that are multiplied as they are read. Others go to PackPanel first: wide
// types, values with scales of their own, and fewer rows than the source is compiled for.
template <class Policy>
int64_t FusedDepth(const Operand& side, const Block& block, int rows, bool pack) {
  if (!IsEightBit(side.dtype) || side.fine) return 0;
  const bool quads = side.prepared || side.depth.Contiguous();
  const bool any = quads && (Policy::kExact || !pack);
  return rows < kMinGemmRows && !any ? 0 : DirectDepth<Policy>(side, block);
}

template <class Policy>
const uint8_t* PackAndMultiply(const Operand& side, const Block& block, const Panel& panel,
                               bool keep, const PackedRows& rows, void* acc, int64_t pitch,
                               bool first, const F32Sums* f32_sums) {
  const bool pack = keep || block.sums || rows.count > kGemvRows;
  const int64_t depth = FusedDepth<Policy>(side, block, rows.count, pack);
  const int64_t rest = block.depth - depth;
  if (depth > 0) {
    const Block part = PartOf(block, 0, depth);
    WithByteType<Policy>(side.dtype, [&]<DType kType>() {
      WithZeroPoints<Policy, kType>(side, [&]<bool kSubtract>() {
        WithColumns<Policy, kType, kSubtract>(side, part, panel, pack, [&](const auto& columns) {
          MultiplyColumns<Policy>(rows, columns, depth, acc, pitch, first,
                                  rest > 0 ? nullptr : f32_sums);
        });
      });
    });
  }
  if (rest > 0) {
    const Panel after = DataFrom(panel, PanelBytes<Policy>(depth));
    PackPanel<Policy>(side, PartOf(block, depth, rest), after);
    const uint8_t* from = rows.data + depth * (4 / Policy::kGroup);
    Multiply<Policy>({from, rows.pitch, rows.count}, after.data, rest, acc, pitch,
                     first && depth == 0, f32_sums);
  }
  AddColumnSums<Policy>(block, panel);
  return panel.data;
}

}  // namespace jaxfp8::JAXFP8_ISA
