// From accumulators to scaled sums, for one row of accumulators:
//
//     acc (L1, or registers)   - zero points   * scale_a * scale_b   --> sums, float64 or float32

#pragma once

#include <type_traits>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// An accumulator of a policy, and vectors of them.
template <class Policy>
using Acc = std::conditional_t<Policy::kExact, int32_t, float>;
template <class Policy>
using AccVector = std::conditional_t<Policy::kExact, S32, F32>;
template <class Policy>
using HalfAccVector = std::conditional_t<Policy::kExact, HalfS32, HalfF32>;

// The factors of one row in its scaled sums; see Panel for the equation.
struct RowFactors {
  double scale, zero, sum;

  RowFactors(const Panel& rows, int row, int64_t depth)
      : scale(rows.scale[row]),
        zero(rows.zero[row]),
        sum(rows.sum[row] - static_cast<double>(depth) * rows.zero[row]) {}
};

// The scaled sums of kWide columns from `i` on, exact accumulators.
inline F64 Scaled(HalfS32 acc, const RowFactors& row, const Panel& columns, int64_t i) {
  const F64 shifted = ToDoubles(acc) - row.zero * Load<F64>(columns.sum + i) -
                      row.sum * Load<F64>(columns.zero + i);
  return shifted * (Load<F64>(columns.scale + i) * row.scale);
}

// Float accumulators, of values less their zero points.
inline F64 Scaled(HalfF32 acc, const RowFactors& row, const Panel& columns, int64_t i) {
  return ToDoubles(acc) * (Load<F64>(columns.scale + i) * row.scale);
}

// Adds `width` scaled accumulators of one row to its sums, or stores them if `first`.
template <class Policy>
void AddScaledRow(const void* acc_of, const Panel& rows, int row, const Panel& columns,
                  int64_t depth, int64_t width, double* sums, bool first) {
  const auto* acc = static_cast<const Acc<Policy>*>(acc_of);
  const RowFactors factors(rows, row, depth);
  for (int64_t i = 0; i < width; i += kWide) {
    const F64 scaled = Scaled(Load<HalfAccVector<Policy>>(acc + i), factors, columns, i);
    Store(sums + i, first ? scaled : Load<F64>(sums + i) + scaled);
  }
}

// Adds float32 sums of scaled accumulators to a row's float64 sums, or stores them if `first`.
inline void AddF32Row(const float* f32_sums, int64_t width, double* sums, bool first) {
  for (int64_t i = 0; i < width; ++i) sums[i] = f32_sums[i] + (first ? 0 : sums[i]);
}

// Accumulators of row `r` less zero points, in float32. The sums of a short chunk are exact in
// float32.
inline F32 LessZeros(S32 acc, const F32Sums& to, int r, int64_t i) {
  return __builtin_convertvector(acc, F32) - to.rows.zero[r] * Load<F32>(to.columns.sum + i) -
         to.rows.sum[r] * Load<F32>(to.columns.zero + i);
}

inline F32 LessZeros(F32 acc, const F32Sums&, int, int64_t) { return acc; }

// The same for one row of a register tile in float32. It reads everything before the first store:
// the compiler does not know the arrays to be disjoint.
template <typename Vector>
[[gnu::always_inline]] inline void AddScaled(const Vector (&acc)[kVectors], const F32Sums& to,
                                             int r) {
  float* sums = to.sums + r * to.pitch;
  F32 all[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = v * kLanes;
    const F32 scale = Load<F32>(to.columns.scale + i) * to.rows.scale[r];
    const F32 before = to.first ? F32{} : Load<F32>(sums + i);
    all[v] = FusedMultiplyAdd(LessZeros(acc[v], to, r, i), scale, before);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) Store(sums + v * kLanes, all[v]);
}

}  // namespace jaxfp8::JAXFP8_ISA
