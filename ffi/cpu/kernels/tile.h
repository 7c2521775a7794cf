// The register tile: up to kRows rows times kColumns columns, summed over one slice of depth.
//
// Written once for every kernel. A kernel's `Sums` says what one 32-bit lane holds (one float, two
// 16-bit or four 8-bit values at consecutive depths) and how a lane of products is added.

#ifndef JAXFP8_CPU_KERNELS_TILE_H_
#define JAXFP8_CPU_KERNELS_TILE_H_

#include <type_traits>

#include "cpu/kernels/in_place.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd.h"

namespace jaxfp8::JAXFP8_ISA {

// What one row brings to the worth of its sums; see Panel for the equation.
struct RowFactors {
  double scale, zero, sum;

  RowFactors(const Panel& left, int row, int64_t depth)
      : scale(left.scale[row]),
        zero(left.zero[row]),
        sum(left.sum[row] - static_cast<double>(depth) * left.zero[row]) {}
};

// The worth of exact sums of kWide columns from `i` on.
inline F64 WorthOf(HalfS32 found, const RowFactors& row, const Panel& right, int64_t i) {
  const F64 shifted =
      ToDoubles(found) - row.zero * Load<F64>(right.sum + i) - row.sum * Load<F64>(right.zero + i);
  return shifted * (Load<F64>(right.scale + i) * row.scale);
}

// Of float sums, of values less their zero points.
inline F64 WorthOf(HalfF32 found, const RowFactors& row, const Panel& right, int64_t i) {
  return ToDoubles(found) * (Load<F64>(right.scale + i) * row.scale);
}

template <class Sums>
using Found = std::conditional_t<Sums::kExact, int32_t, float>;

template <class Sums>
using HalfFound = std::conditional_t<Sums::kExact, HalfS32, HalfF32>;

// Adds the worth of `width` sums of one row, or stores it where they are the first.
template <class Sums>
inline void AddRow(const Found<Sums>* found, const Panel& left, int row, const Panel& right,
                   int64_t depth, int64_t width, double* sums, bool first) {
  const RowFactors factors(left, row, depth);
  for (int64_t i = 0; i < width; i += kWide) {
    const F64 worth = WorthOf(Load<HalfFound<Sums>>(found + i), factors, right, i);
    Store(sums + i, first ? worth : Load<F64>(sums + i) + worth);
  }
}

// The inner loop: kCount rows times one strip. A function of its own, so that no register is kept
// for what comes after it. Indices must be known to the compiler: unrolled to the last.
template <class Sums, int kCount>
__attribute__((noinline)) void SumTile(const uint8_t* rows, int64_t row_pitch, const uint8_t* strip,
                                       int64_t groups, Found<Sums>* found, int64_t pitch,
                                       bool first) {
  using Vector = typename Sums::Vector;
  using Lane = typename Sums::Lane;
  Vector sum[kCount][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = first ? Vector{} : Load<Vector>(found + r * pitch + v * kLanes);
    }
  }
  for (int64_t g = 0; g < groups; ++g, strip += kVectors * kBytes, rows += sizeof(Lane)) {
    Vector column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = LoadColumns<Sums>(strip + v * kBytes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
      const Lane row = Load<Lane>(rows + r * row_pitch);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Sums::Add(sum[r][v], row, column[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Store(found + r * pitch + v * kLanes, sum[r][v]);
  }
}

template <class Sums>
void Multiply(const uint8_t* rows, int64_t row_pitch, int count, const uint8_t* strip,
              int64_t depth, void* sums, int64_t pitch, bool first) {
  auto* found = static_cast<Found<Sums>*>(sums);
  const int64_t groups = (depth + Sums::kGroup - 1) / Sums::kGroup;
  switch (count) {
    case 1:
      return SumTile<Sums, 1>(rows, row_pitch, strip, groups, found, pitch, first);
    case 2:
      return SumTile<Sums, 2>(rows, row_pitch, strip, groups, found, pitch, first);
    case 3:
      return SumTile<Sums, 3>(rows, row_pitch, strip, groups, found, pitch, first);
    case 4:
      return SumTile<Sums, 4>(rows, row_pitch, strip, groups, found, pitch, first);
    case 5:
      return SumTile<Sums, 5>(rows, row_pitch, strip, groups, found, pitch, first);
    default:
      return SumTile<Sums, kRows>(rows, row_pitch, strip, groups, found, pitch, first);
  }
}

template <class Sums>
void Add(const void* found, const Panel& left, int row, const Panel& right, int64_t depth,
         int64_t width, double* sums, bool first) {
  AddRow<Sums>(static_cast<const Found<Sums>*>(found), left, row, right, depth, width, sums, first);
}

// Of float sums.
inline void AddNarrow(const void* found, const Panel& left, int row, const float* scale,
                      int64_t width, float* sums, bool first) {
  const auto* raw = static_cast<const float*>(found);
  const auto of_row = static_cast<float>(left.scale[row]);
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 worth = Load<F32>(raw + i) * (Load<F32>(scale + i) * of_row);
    Store(sums + i, first ? worth : Load<F32>(sums + i) + worth);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_TILE_H_
