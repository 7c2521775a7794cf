// The rows of the kernel table that share one shape.

#ifndef JAXFP8_CPU_KERNELS_ISA_ENTRY_H_
#define JAXFP8_CPU_KERNELS_ISA_ENTRY_H_

#include <limits>

#include "cpu/kernels/epilogue/epilogue.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemm/pack_and_multiply.h"
#include "cpu/kernels/gemv/gemv.h"
#include "cpu/kernels/kernel.h"

namespace jaxfp8::JAXFP8_ISA {

template <class Policy>
constexpr auto InPlaceOf() -> decltype(Kernel::multiply) {
  if constexpr (Policy::kAsPrepared == DType::kNone)
    return nullptr;
  else
    return Multiply<InPlace<Policy>>;
}

// What a stretch finds passes through L1. With 1024 lines 16 rows of int8 from memory took 1.12
// times as long, with 64 to 256, which fill half of an L1, 16 rows of float32, bfloat16 and int8
// 1.1, 1.08 and 1.02 times (AMD Zen 4).
inline constexpr ByFirstRows kFirstRows = {
    .depth = 512, .rows = std::numeric_limits<int>::max(), .quads = true};

// Bytes need no decoding: along the depth, they are multiplied as they lie for more rows.
template <class Policy>
constexpr Few FewOf() {
  Few few = {.rows = kFewRows,
             .across = kFewRows,
             .along = 2 * kFewRows,
             .prepared = kFewRows,
             .least_along = 2,
             .depth_along = 32,
             .narrow_along = !Policy::kExact && Policy::kGroup == 2,
             .spare = 0,
             .tiles = {}};
  if constexpr (kByTilesAlong<Policy>) few.tiles = kTilesAlong<Policy>;
  if constexpr (kBytesAlong<Policy>) {
    few.along = few.tiles.least - 1;
    few.depth_along = kDepthOfRow;
  }
  return few;
}

template <class Policy>
constexpr Kernel Entry(const char* name, unsigned needs, Sums sums) {
  return {
      .name = name,
      .needs = needs,
      .sums = sums,
      .rows = kRows,
      .columns = kColumns,
      .height = 1,
      .depth = Policy::kExact ? 4096 : 1024,
      .slice = kSlice<Policy::kGroup>,
      .group = Policy::kGroup,
      .size = 4 / Policy::kGroup,
      .room = {.rows = 1280 << 10, .along = 1280 << 10, .sums = 256 << 10},
      .as_prepared = Policy::kAsPrepared,
      .few = FewOf<Policy>(),
      .least = {},
      .by_first_rows = kFirstRows,
      .shifted_rows = Policy::kShiftedRows,
      .shifted_columns = Policy::kShiftedColumns,
      .rows_less_zero = requires { Policy::kRowsLessZero; },
      .enter = nullptr,
      .leave = nullptr,
      .pack_rows = PackRows<Policy>,
      .pack_rows_along = PackRows<Policy>,
      .start_columns = StartColumns<Policy>,
      .pack_columns = PackColumns<Policy>,
      .sum_columns = SumColumns<Policy>,
      .multiply = Multiply<Policy>,
      .multiply_in_place = InPlaceOf<Policy>(),
      .pack_and_multiply = PackAndMultiply<Policy>,
      .add = Add<Policy>,
      .multiply_few = MultiplyFew<Policy>,
      .finish = Finish,
      .finish_found = FinishFound<Policy>,
  };
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_ISA_ENTRY_H_
