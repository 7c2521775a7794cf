// Sources of columns for the micro-kernel: B in place, decoded in registers.
//
//     LineColumns    B as [K, N]: kNR values of each of `group` lines, interleaved
//     QuadColumns    prepared B, or [N, K] transposed by quads: 4 K values of a column side by side
//
//     memory --load--> 8-bit codes --decode--> b[kVectors] --> micro-kernel
//                                                    \-store-> packed micro-panel, for other rows

#pragma once

#include "cpu/kernels/operand/lines.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/policy/lane_policy.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// The zero points of kNR columns, if they are subtracted.
template <class Policy, bool kSubtract>
class ColumnZeros {
 public:
  explicit ColumnZeros(const double* zero) {
    for (int v = 0; kSubtract && v < kVectors; ++v) zero_[v] = Zeros(zero + v * kLanes);
  }

  // The columns of vector v less their zero points.
  [[gnu::always_inline]] typename Policy::Vector Less(int v, typename Policy::Vector column) const {
    if constexpr (kSubtract) column -= zero_[v];
    return column;
  }

 private:
  F32 zero_[kSubtract ? kVectors : 1];
};

// The last byte of the next micro-panel, or cache line. Lines need not start at a cache line: its
// first byte may be in a line already read.
inline constexpr int kNextPanel = std::max(kNR, 64) + 63;

// The fewest rows of the first tile of a GEMM. Tiles have even heights. Fewer rows times [K, N] are
// a GEMV; so are few rows times [N, K], but for short chunks.
inline constexpr int kLeastRows = (kMR + 1) / 2;

// Lines across K, at equal distances. Packs the columns to `to` unless it is null, and prefetches
// the next micro-panel into L2.
template <class Policy, DType kType, bool kSubtract>
class LineColumns {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kGroups = 1;
  static constexpr int kFewestRows = kLeastRows, kMostRows = kMR;

  LineColumns(const Lines& lines, const double* zero, uint8_t* to)
      : zero_(zero), step_(lines[Policy::kGroup] - lines[0]), to_(to) {
    for (int j = 0; j < Policy::kGroup; ++j) line_[j] = lines[j];
  }

  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(int, Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int j = 0; j < Policy::kGroup; ++j) {
      for (int i = 0; i < kNR * (SizeOf(kType) - 1) + 1; i += 64) {
        __builtin_prefetch(line_[j] + kNextPanel * SizeOf(kType) - i, 0, 2);
      }
    }
    Policy::template LoadLines<kType>(line_, column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = zero_.Less(v, column[v]);
#pragma GCC unroll 4
    for (int j = 0; j < Policy::kGroup; ++j) line_[j] += step_;
    if (!to_) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, to_ += kBytes) Store(to_, column[v]);
  }

 private:
  ColumnZeros<Policy, kSubtract> zero_;
  const uint8_t* line_[Policy::kGroup];
  int64_t step_;
  uint8_t* to_;
};

// Quads of kNR columns, interleaved, `pitch` bytes from quad to quad. With `kPack` each is packed
// to `to` and read again from there, for lack of registers.
template <class Policy, DType kType, bool kSubtract, bool kPack>
class QuadColumns {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kGroups = kQuad / Policy::kGroup;
  // Of exact sums few rows need the packed columns, too: to add them up.
  static constexpr int kFewestRows = kPack && !Policy::kExact ? kLeastRows : 1;
  static constexpr int kMostRows = kPack ? kMR : std::min(kMR, kGemvRows);

  QuadColumns(const uint8_t* from, int64_t pitch, const double* zero, uint8_t* to)
      : zero_(zero), from_(from), pitch_(pitch), to_(to) {}

  [[gnu::always_inline]] void Start() {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(from_ + kStreamAhead + v * kBytes);
      Vector part[kGroups];
      Policy::template LoadQuads<kType>(Load<S32>(from_ + v * kBytes), part);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Vector column = zero_.Less(v, part[g]);
        if constexpr (kPack) {
          Store(to_ + (g * kVectors + v) * kBytes, column);
        } else {
          column_[g][v] = column;
        }
      }
    }
    from_ += pitch_;
    if constexpr (kPack) to_ += kGroups * kVectors * kBytes;
  }

  [[gnu::always_inline]] void Next(int g, Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kPack) {
        column[v] = Load<Vector>(to_ + ((g - kGroups) * kVectors + v) * kBytes);
      } else {
        column[v] = column_[g][v];
      }
    }
  }

 private:
  ColumnZeros<Policy, kSubtract> zero_;
  const uint8_t* from_;
  int64_t pitch_;
  uint8_t* to_;
  Vector column_[kPack ? 1 : kGroups][kVectors];
};

// Bytes from quad to quad of the same prepared columns.
inline constexpr int64_t kQuadsPitch = kPreparedColumns * kQuad;
static_assert(kPreparedColumns % kNR == 0);

}  // namespace jaxfp8::JAXFP8_ISA
