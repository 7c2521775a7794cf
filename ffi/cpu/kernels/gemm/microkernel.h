// The micro-kernel: a register tile of up to kMR rows and kNR columns, summed along K.
//
//     for each group of K values                        (a group fills a 32-bit lane)
//       columns.Next()  ->  b[kVectors]                 kNR columns, in registers
//       for each row r:     a = one lane, broadcast     packed rows, in L1
//         acc[r][v] += a * b[v]                         in registers
//
//     A packed [M][K]          B, from a source of columns
//     r0  a a a a ...          b0 b1 ... b63   k = 0..group-1
//     r1  a a a a ...          b0 b1 ... b63   k = group..
//
// The source is a packed micro-panel, or B as stored (gemm/pack.h). In the second case Next
// decodes B, and can store the decoded values. GEMM and GEMV over [K, N] share this loop. A policy
// defines a lane's contents and its multiplication (policy/lane_policy.h).

#pragma once

#include "cpu/kernels/gemm/scaled_sums.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// The columns of a packed micro-panel.
template <class Policy>
class PackedColumns {
 public:
  static constexpr int kGroups = 1;  // between two calls of Start
  static constexpr int kMinRows = 1, kMaxRows = kMR;

  explicit PackedColumns(const uint8_t* panel) : panel_(panel) {}

  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(int, typename Policy::Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, panel_ += kBytes) {
      column[v] = Load<typename Policy::Vector>(panel_);
    }
  }

 private:
  const uint8_t* panel_;
};

// The accumulators of kCount rows and one micro-panel. All indices are compile-time constants.
template <class Policy, int kCount>
class RegisterTile {
 public:
  using Vector = typename Policy::Vector;
  using Lane = typename Policy::Lane;

  [[gnu::always_inline]] RegisterTile(const Acc<Policy>* acc, int64_t pitch, bool first) {
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc_[r][v] = first ? Vector{} : Load<Vector>(acc + r * pitch + v * kLanes);
      }
    }
  }

  // Adds the products of `groups` groups.
  template <class Columns>
  [[gnu::always_inline]] void Multiply(const uint8_t* rows, int64_t row_pitch, Columns& columns,
                                       int64_t groups) {
    for (int64_t g = 0; g < groups; g += Columns::kGroups) {
      columns.Start();
#pragma GCC unroll 4
      for (int i = 0; i < Columns::kGroups; ++i, rows += sizeof(Lane)) {
        Vector column[kVectors];
        columns.Next(i, column);
#pragma GCC unroll 8
        for (int r = 0; r < kCount; ++r) {
          const Lane row = Load<Lane>(rows + r * row_pitch);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            acc_[r][v] = Policy::MultiplyAdd(acc_[r][v], row, column[v]);
          }
        }
      }
    }
  }

  [[gnu::always_inline]] void StoreTo(Acc<Policy>* acc, int64_t pitch) const {
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Store(acc + r * pitch + v * kLanes, acc_[r][v]);
    }
  }

  [[gnu::always_inline]] void AddTo(const F32Sums& sums) const {
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) AddScaled(acc_[r], sums, r);
  }

 private:
  Vector acc_[kCount][kVectors];
};

// Not inlined: no register is kept for the caller.
template <class Policy, int kCount, class Columns>
[[gnu::noinline]] void MultiplyTile(const PackedRows& rows, Columns columns, int64_t groups,
                                    Acc<Policy>* acc, int64_t pitch, bool first,
                                    const F32Sums* f32_sums) {
  RegisterTile<Policy, kCount> tile(acc, pitch, first);
  tile.Multiply(rows.data, rows.pitch, columns, groups);
  if (f32_sums) {
    const F32Sums to = *f32_sums;
    tile.AddTo(to);
  } else {
    tile.StoreTo(acc, pitch);
  }
}

// Calls `function` with a constant count, kMin to kMax.
template <int kMax, int kMin = 1, class Function>
[[gnu::always_inline]] inline void WithCount(int64_t count, const Function& function) {
  if constexpr (kMax > kMin) {
    if (count < kMax) return WithCount<kMax - 1, kMin>(count, function);
  }
  function.template operator()<kMax>();
}

// Rows: kMinRows to kMaxRows of the source.
template <class Policy, class Columns>
void MultiplyColumns(const PackedRows& rows, const Columns& columns, int64_t depth, void* acc,
                     int64_t pitch, bool first, const F32Sums* f32_sums) {
  const int64_t groups = (depth + Policy::kGroup - 1) / Policy::kGroup;
  WithCount<Columns::kMaxRows, Columns::kMinRows>(rows.count, [&]<int kCount> {
    MultiplyTile<Policy, kCount, Columns>(rows, columns, groups, static_cast<Acc<Policy>*>(acc),
                                          pitch, first, f32_sums);
  });
}

template <class Policy>
void Multiply(const PackedRows& rows, const uint8_t* panel, int64_t depth, void* acc, int64_t pitch,
              bool first, const F32Sums* f32_sums) {
  MultiplyColumns<Policy>(rows, PackedColumns<Policy>(panel), depth, acc, pitch, first, f32_sums);
}

}  // namespace jaxfp8::JAXFP8_ISA
