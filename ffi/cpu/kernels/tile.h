// The register tile: up to kRows rows times kColumns columns, summed over one block of depth.
//
// Written once for every kernel. A kernel's `Sums` says what one 32-bit lane holds (one float, two
// 16-bit or four 8-bit values at consecutive depths) and how a lane of products is added.

#ifndef JAXFP8_CPU_KERNELS_TILE_H_
#define JAXFP8_CPU_KERNELS_TILE_H_

#include <type_traits>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd.h"

namespace jaxfp8::JAXFP8_ISA {

// Adds the worth of one row of exact integer sums; see Panel for the equation.
inline void AddIntegers(const int32_t* found, const Panel& left, int row, const Panel& right,
                        int64_t depth, double* sums) {
  const double row_zero = left.zero[row];
  const double row_sum = left.sum[row] - static_cast<double>(depth) * row_zero;
  for (int i = 0; i < kColumns; i += kWide) {
    const F64 raw = __builtin_convertvector(Load<HalfS32>(found + i), F64);
    const F64 shifted =
        raw - row_zero * Load<F64>(right.sum + i) - row_sum * Load<F64>(right.zero + i);
    const F64 worth = shifted * (Load<F64>(right.scale + i) * left.scale[row]);
    Store(sums + i, Load<F64>(sums + i) + worth);
  }
}

inline void AddFloats(const float* found, const Panel& left, int row, const Panel& right,
                      double* sums) {
  for (int i = 0; i < kColumns; i += kWide) {
    const F64 raw = __builtin_convertvector(Load<HalfF32>(found + i), F64);
    const F64 worth = raw * (Load<F64>(right.scale + i) * left.scale[row]);
    Store(sums + i, Load<F64>(sums + i) + worth);
  }
}

template <class Sums>
using Found = std::conditional_t<Sums::kExact, int32_t, float>;

template <class Sums>
inline void AddRow(const Found<Sums>* found, const Panel& left, int row, const Panel& right,
                   int64_t depth, double* sums) {
  if constexpr (Sums::kExact) {
    AddIntegers(found, left, row, right, depth, sums);
  } else {
    AddFloats(found, left, row, right, sums);
  }
}

// Copies sums out of registers. Indices must be known to the compiler: unrolled to the last.
template <class Sums, int kCount>
inline void StoreTile(const typename Sums::Vector (&sum)[kCount][kVectors],
                      Found<Sums> (&found)[kCount][kColumns]) {
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(found[r] + v * kLanes, sum[r][v]);
  }
}

// The inner loop. A function of its own, so that no register is kept for what comes after it.
template <class Sums, int kCount>
__attribute__((noinline)) void SumTile(const uint8_t* rows, int64_t pitch, const uint8_t* columns,
                                       int64_t groups, Found<Sums> (&found)[kCount][kColumns]) {
  using Vector = typename Sums::Vector;
  using Lane = typename Sums::Lane;
  Vector sum[kCount][kVectors] = {};
  for (int64_t g = 0; g < groups; ++g, columns += kVectors * kBytes, rows += sizeof(Lane)) {
    Vector column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = Load<Vector>(columns + v * kBytes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      const Lane row = Load<Lane>(rows + r * pitch);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Sums::Add(sum[r][v], row, column[v]);
    }
  }
  StoreTile<Sums, kCount>(sum, found);
}

template <class Sums, int kCount>
void MultiplyRows(const Panel& left, const Panel& right, int64_t depth, double* sums,
                  int64_t pitch) {
  Found<Sums> found[kCount][kColumns];
  const int64_t groups = (depth + Sums::kGroup - 1) / Sums::kGroup;
  SumTile<Sums, kCount>(left.data, left.pitch, right.data, groups, found);
  for (int r = 0; r < kCount; ++r) {
    AddRow<Sums>(found[r], left, r, right, depth, sums + r * pitch);
  }
}

template <class Sums>
void Multiply(const Panel& left, int rows, const Panel& right, int64_t depth, double* sums,
              int64_t pitch) {
  switch (rows) {
    case 1:
      return MultiplyRows<Sums, 1>(left, right, depth, sums, pitch);
    case 2:
      return MultiplyRows<Sums, 2>(left, right, depth, sums, pitch);
    case 3:
      return MultiplyRows<Sums, 3>(left, right, depth, sums, pitch);
    case 4:
      return MultiplyRows<Sums, 4>(left, right, depth, sums, pitch);
    case 5:
      return MultiplyRows<Sums, 5>(left, right, depth, sums, pitch);
    default:
      return MultiplyRows<Sums, kRows>(left, right, depth, sums, pitch);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_TILE_H_
