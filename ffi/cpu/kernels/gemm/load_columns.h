// Packed columns as they are multiplied, and prepared columns that need no packing.

#ifndef JAXFP8_CPU_KERNELS_GEMM_LOAD_COLUMNS_H_
#define JAXFP8_CPU_KERNELS_GEMM_LOAD_COLUMNS_H_

#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// Sums of columns that lie as `jaxfp8.prepare` lays them; a quad is a group.
template <class Sums>
struct InPlace : Sums {
  static typename Sums::Vector Packed(typename Sums::Vector quads) {
    typename Sums::Vector part[1];
    Sums::template SplitQuads<Sums::kAsPrepared>((S32)quads, part);
    return part[0];
  }
};

// One group of as many columns as a vector has lanes.
template <class Sums>
[[gnu::always_inline]] inline typename Sums::Vector LoadColumns(const uint8_t* from) {
  const auto columns = Load<typename Sums::Vector>(from);
  if constexpr (requires { Sums::Packed(columns); }) {
    __builtin_prefetch(from + kStreamAhead);
    return Sums::Packed(columns);
  } else {
    return columns;
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMM_LOAD_COLUMNS_H_
