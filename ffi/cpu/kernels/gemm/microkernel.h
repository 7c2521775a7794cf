// The register tile: up to kRows rows times kColumns columns, summed over one slice of depth.
//
// Written once for every kernel. A kernel's `Sums` says what one 32-bit lane holds (one float, two
// 16-bit or four 8-bit values at consecutive depths) and how a lane of products is added.

#ifndef JAXFP8_CPU_KERNELS_GEMM_MICROKERNEL_H_
#define JAXFP8_CPU_KERNELS_GEMM_MICROKERNEL_H_

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/gemm/load_columns.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"

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

// Of row `r` less their zero points, in float32, which holds exact sums of a short chunk.
inline F32 Shifted(S32 found, const NarrowSums& to, int r, int64_t i) {
  return __builtin_convertvector(found, F32) - to.rows.zero[r] * Load<F32>(to.columns.sum + i) -
         to.rows.sum[r] * Load<F32>(to.columns.zero + i);
}

inline F32 Shifted(F32 found, const NarrowSums&, int, int64_t) { return found; }

// Adds the worth of a tile's row, or stores it where it is the first. All is read before anything
// is stored: the compiler does not know that they are apart.
template <typename Vector>
[[gnu::always_inline]] inline void AddNarrow(const Vector (&found)[kVectors], const NarrowSums& to,
                                             int r) {
  float* sums = to.sums + r * to.pitch;
  F32 all[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = v * kLanes;
    const F32 scale = Load<F32>(to.columns.scale + i) * to.rows.scale[r];
    const F32 before = to.first ? F32{} : Load<F32>(sums + i);
    all[v] = MultiplyAdd(Shifted(found[v], to, r, i), scale, before);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) Store(sums + v * kLanes, all[v]);
}

// Sums, and those of the columns themselves.
template <class Sums>
struct AndTotals : Sums {
  using Alone = Sums;
  static constexpr bool kTotals = true;
};

template <class Sums>
using Found = std::conditional_t<Sums::kExact, int32_t, float>;

template <class Sums>
using HalfFound = std::conditional_t<Sums::kExact, HalfS32, HalfF32>;
template <class Sums>
using FoundVector = std::conditional_t<Sums::kExact, S32, F32>;

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

// How many of the next lines are asked for with each group of packed columns, and by how many tiles
// then. At once, while columns are packed, they kept what is packed waiting: 16 rows of int8
// times 4096 x 50257 took 1.2 times as long (AMD Zen 4).
template <class Sums>
inline constexpr int kAsked = std::max(Sums::kGroup / 2, 1);
template <class Sums>
inline constexpr int kTilesThatAsk = Sums::kGroup / kAsked<Sums>;

// The columns of a packed strip, group by group. Lines are asked for from `next` on, which may be
// anything.
template <class Sums>
class PackedColumns {
 public:
  static constexpr int kGroups = 1;

  PackedColumns(const uint8_t* strip, const uint8_t* next, int64_t step)
      : strip_(strip), next_(next), step_(step) {}

  // To be called before every kGroups groups.
  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(typename Sums::Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, strip_ += kBytes) column[v] = LoadColumns<Sums>(strip_);
#pragma GCC unroll 4
    for (int i = 0; i < kAsked<Sums>; ++i, next_ += step_) __builtin_prefetch(next_, 0, 2);
  }

 private:
  const uint8_t *strip_, *next_;
  int64_t step_;
};

// The inner loop: kCount rows times one strip. A function of its own, so that no register is kept
// for what comes after it. Indices must be known to the compiler: unrolled to the last.
template <class Sums, int kCount, bool kNarrow, class Columns>
__attribute__((noinline)) void SumTile(const uint8_t* rows, int64_t row_pitch, Columns columns,
                                       int64_t groups, Found<Sums>* found, int64_t pitch,
                                       bool first, const NarrowSums* narrow) {
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
  for (int64_t start = 0; start < groups; start += Columns::kGroups) {
    columns.Start();
#pragma GCC unroll 4
    for (int g = 0; g < Columns::kGroups; ++g, rows += sizeof(Lane)) {
      Vector column[kVectors];
      columns.Next(column);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) {
        const Lane row = Load<Lane>(rows + r * row_pitch);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Sums::Add(sum[r][v], row, column[v]);
      }
    }
  }
  const NarrowSums to = kNarrow ? *narrow : NarrowSums{};
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r) {
    if constexpr (kNarrow) {
      AddNarrow(sum[r], to, r);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Store(found + r * pitch + v * kLanes, sum[r][v]);
    }
  }
}

// Calls `function` with what the compiler has to know: a count from 1 to kMost.
template <int kMost, class Function>
[[gnu::always_inline]] inline void WithCount(int64_t count, const Function& function) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithCount<kMost - 1>(count, function);
  }
  function.template operator()<kMost>();
}

template <class Sums, class Columns>
void MultiplyRows(const RowsOfTile& rows, const Columns& columns, int64_t depth, void* sums,
                  int64_t pitch, bool first, const NarrowSums* narrow) {
  auto* found = static_cast<Found<Sums>*>(sums);
  const int64_t groups = (depth + Sums::kGroup - 1) / Sums::kGroup;
  WithCount<kRows>(rows.count, [&]<int kCount> {
    const auto sum =
        narrow ? SumTile<Sums, kCount, true, Columns> : SumTile<Sums, kCount, false, Columns>;
    sum(rows.data, rows.pitch, columns, groups, found, pitch, first, narrow);
  });
}

template <class Sums>
void Multiply(const RowsOfTile& rows, const uint8_t* strip, int64_t depth, void* found,
              int64_t pitch, bool first, const NarrowSums* narrow, UpcomingLines& next) {
  // Where there are none, for what is at hand.
  const bool asks = next.count > 0;
  const PackedColumns<Sums> columns(strip, asks ? next.at : strip, asks ? next.step : 0);
  MultiplyRows<Sums>(rows, columns, depth, found, pitch, first, narrow);
  const int64_t asked = kAsked<Sums> * (depth / Sums::kGroup);
  next.at += asked * next.step;
  next.count -= asked;
}

template <class Sums>
void Add(const void* found, const Panel& left, int row, const Panel& right, int64_t depth,
         int64_t width, double* sums, bool first) {
  AddRow<Sums>(static_cast<const Found<Sums>*>(found), left, row, right, depth, width, sums, first);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMM_MICROKERNEL_H_
