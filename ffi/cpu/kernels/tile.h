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

// Adds the worth of `width` exact integer sums of one row, or stores it where they are the first;
// see Panel for the equation.
inline void AddIntegers(const int32_t* found, const Panel& left, int row, const Panel& right,
                        int64_t depth, int64_t width, double* sums, bool first) {
  const double row_zero = left.zero[row];
  const double row_sum = left.sum[row] - static_cast<double>(depth) * row_zero;
  for (int64_t i = 0; i < width; i += kWide) {
    const F64 raw = ToDoubles(Load<HalfS32>(found + i));
    const F64 shifted =
        raw - row_zero * Load<F64>(right.sum + i) - row_sum * Load<F64>(right.zero + i);
    const F64 worth = shifted * (Load<F64>(right.scale + i) * left.scale[row]);
    Store(sums + i, first ? worth : Load<F64>(sums + i) + worth);
  }
}

inline void AddFloats(const float* found, const Panel& left, int row, const Panel& right,
                      int64_t width, double* sums, bool first) {
  for (int64_t i = 0; i < width; i += kWide) {
    const F64 raw = ToDoubles(Load<HalfF32>(found + i));
    const F64 worth = raw * (Load<F64>(right.scale + i) * left.scale[row]);
    Store(sums + i, first ? worth : Load<F64>(sums + i) + worth);
  }
}

template <class Sums>
using Found = std::conditional_t<Sums::kExact, int32_t, float>;

template <class Sums>
inline void AddRow(const Found<Sums>* found, const Panel& left, int row, const Panel& right,
                   int64_t depth, int64_t width, double* sums, bool first) {
  if constexpr (Sums::kExact) {
    AddIntegers(found, left, row, right, depth, width, sums, first);
  } else {
    AddFloats(found, left, row, right, width, sums, first);
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
