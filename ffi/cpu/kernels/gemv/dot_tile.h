// A tile of packed rows and of columns along K: its products, in lanes.
//
//     for each step of kNR values of K:
//       b = decode(c)                         in registers
//       acc[r][c] += a * b                    lane by lane: up to 16 vectors of accumulators

#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/transpose.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// The lanes of a vector, rotated: from `first` on, then those before it.
template <int kFirst, int... kLane>
constexpr S32 Rotated(std::integer_sequence<int, kLane...>) {
  return S32{(kLane + kFirst) % kLanes...};
}

// The sums of the lanes of kCount vectors, in the first kCount lanes. The order of the additions
// does not depend on kCount.
template <int kCount, typename Vector>
[[gnu::always_inline]] inline Vector SumLanes(Vector (&of)[kCount]) {
#pragma GCC unroll 4
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      of[i] = __builtin_shuffle(of[i], of[i + half], kLowLanes) +
              __builtin_shuffle(of[i], of[i + half], kHighLanes);
    }
  }
  constexpr std::make_integer_sequence<int, kLanes> kEach;
  Vector sums = of[0];
  if constexpr (kCount < kLanes) sums += __builtin_shuffle(sums, Rotated<kLanes / 2>(kEach));
  if constexpr (2 * kCount < kLanes) sums += __builtin_shuffle(sums, Rotated<kLanes / 4>(kEach));
  static_assert(4 * kCount >= kLanes);
  return sums;
}

// Copies `count` bytes and fills the rest of kRoom. Masked for speed: every column needs it in
// every chunk, unless the chunk's depth is a multiple of kNR.
template <int kRoom>
inline void CopyPadded(const uint8_t* from, int64_t count, int fill, uint8_t* to) {
#if defined(__AVX512F__)
  static_assert(kRoom % kBytes == 0);
  const auto filling = _mm512_set1_epi8(static_cast<char>(fill));
#pragma GCC unroll 4
  for (int at = 0; at < kRoom; at += kBytes) {
    const int64_t left = std::clamp<int64_t>(count - at, 0, kBytes);
    const __mmask64 present = left > 0 ? ~0ull >> (kBytes - left) : 0;
    const auto values = (S32)_mm512_maskz_loadu_epi8(present, from + at);
    Store(to + at, values | (S32)_mm512_maskz_add_epi8(~present, filling, __m512i{}));
  }
#else
  std::memset(to, fill, kRoom);
  std::memcpy(to, from, count);
#endif
}

// Columns of a tile: at most 4, and their sums for all rows fit the lanes of one vector.
template <int kRowCount>
inline constexpr int kTileColumns = std::min<int>(4, kLanes / std::bit_ceil(unsigned{kRowCount}));

// A tile of kRowCount packed rows and some columns along K. With `kSums`, also the sums of the
// columns; with `kSubtract`, columns are taken less their zero points.
template <class Policy, DType kType, int kRowCount, bool kSubtract, bool kSums>
class DotTile {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kRows = kRowCount, kColumnCount = kTileColumns<kRowCount>;
  static constexpr int kVectorCount = std::bit_ceil(unsigned{kRowCount}) * kColumnCount;
  static constexpr int kParts = kVectors / Policy::kGroup;
  static constexpr int kRowBytes = kParts * kBytes;  // of a packed row, for kNR values
  using From = const uint8_t* [kColumnCount];

  DotTile() = default;

  DotTile(const From& from, const double* zero) {
    for (int c = 0; c < kColumnCount; ++c) {
      from_[c] = from[c];
      if constexpr (kSubtract) zero_[c] = F32{} + static_cast<float>(zero[c]);
    }
  }

  // Prefetches `ahead` bytes further: the next columns. Inlined, a short piece keeps its sums in
  // registers.
  [[gnu::always_inline]] void Multiply(const uint8_t* rows, int64_t pitch, int64_t depth,
                                       int64_t ahead) {
    int64_t k = 0;
    for (; k + kNR <= depth; k += kNR, rows += kRowBytes) {
      Step(from_, rows, pitch);
#pragma GCC unroll 4
      for (int c = 0; c < kColumnCount; ++c) {
        if (ahead) __builtin_prefetch(from_[c] + ahead, 0, 2);
        from_[c] += kNR;
      }
    }
    if (k < depth) Rest(rows, pitch, depth - k);
  }

  // Adds the scaled accumulators to those of the whole of K, lane by lane. The scales of columns
  // are kMaxRunChunks apart.
  [[gnu::always_inline]] void AddScaledTo(DotTile& whole, const float (&row)[kRowCount],
                                          const float* column) const {
#pragma GCC unroll 4
    for (int r = 0; r < kRowCount; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumnCount; ++c) {
        const F32 scale = row[r] * column[c * kMaxRunChunks] - F32{};  // less 0 costs nothing
        whole.acc_[r][c] = FusedMultiplyAdd(acc_[r][c], scale, whole.acc_[r][c]);
      }
    }
  }

  // Adds the scaled products of one step, kNR values of kChunks chunks. `rows` are those of the
  // chunks. The scales of columns are kMaxRunChunks apart, and their zero points from chunk to
  // chunk kNR.
  template <int kChunks>
  [[gnu::always_inline]] void AddScaledStep(const From& from, const uint8_t* const (&rows)[kChunks],
                                            int64_t pitch,
                                            const float (&row_scale)[kChunks][kRowCount],
                                            const float* scale, const double* zero) {
    constexpr int kEach = kParts / kChunks;  // parts of a chunk
#pragma GCC unroll 4
    for (int c = 0; c < kColumnCount; ++c) {
      Vector column[kParts];
      Policy::template LoadAlong<kType>(from[c], column);
#pragma GCC unroll 4
      for (int p = 0; kSubtract && p < kParts; ++p) {
        column[p] -= F32{} + static_cast<float>(zero[p / kEach * kNR + c]);
      }
#pragma GCC unroll 4
      for (int k = 0; k < kChunks; ++k) {
#pragma GCC unroll 4
        for (int r = 0; r < kRowCount; ++r) {
          Vector sum{};
          const uint8_t* from_row = rows[k] + r * pitch;
          // More rows would be kept in registers, and the tables of codes would not: 1.4x slower.
          if constexpr (kRowCount > 2) asm("" : "+r"(from_row));
#pragma GCC unroll 4
          for (int p = 0; p < kEach; ++p) {
            const auto row = Load<Vector>(from_row + p * kBytes);
            sum = Policy::Dot(sum, row, column[k * kEach + p]);
          }
          const F32 both = row_scale[k][r] * scale[c * kMaxRunChunks + k] - F32{};
          acc_[r][c] = FusedMultiplyAdd(sum, both, acc_[r][c]);
        }
      }
    }
  }

  // Lane r * kColumnCount + c has the sum of row r and column c.
  Vector Sums() const {
    Vector all[kVectorCount] = {};
#pragma GCC unroll 4
    for (int r = 0; r < kRowCount; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumnCount; ++c) all[r * kColumnCount + c] = acc_[r][c];
    }
    return SumLanes(all);
  }

  // Lane c has the sum of column c.
  Vector ColumnSums() const {
    Vector all[std::max(kColumnCount, kLanes / 4)] = {};
    std::copy_n(total_, kColumnCount, all);
    return SumLanes(all);
  }

 private:
  [[gnu::always_inline]] void Step(const From& from, const uint8_t* rows, int64_t pitch) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumnCount; ++c) {
      Vector column[kParts];
      Policy::template LoadAlong<kType>(from[c], column);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        if constexpr (kSubtract) column[p] -= zero_[c];
#pragma GCC unroll 4
        for (int r = 0; r < kRowCount; ++r) {
          const Vector row = Load<Vector>(rows + r * pitch + p * kBytes);
          acc_[r][c] = Policy::Dot(acc_[r][c], row, column[p]);
        }
        if constexpr (kSums) total_[c] = Policy::Dot(total_[c], Policy::Ones(), column[p]);
      }
    }
  }

  // The end of the columns, less than a step, padded with codes of 0.
  void Rest(const uint8_t* rows, int64_t pitch, int64_t count) {
    constexpr int kSize = 4 / Policy::kGroup;
    uint8_t columns[kColumnCount][kNR], padded[kRowCount][kRowBytes];
    From from;
    for (int c = 0; c < kColumnCount; ++c) {
      CopyPadded<kNR>(from_[c], count, Policy::template kZeroCode<kType>, columns[c]);
      from[c] = columns[c];
    }
    for (int r = 0; r < kRowCount; ++r) {
      CopyPadded<kRowBytes>(rows + r * pitch, count * kSize, 0, padded[r]);
    }
    Step(from, padded[0], kRowBytes);
  }

  Vector acc_[kRowCount][kColumnCount] = {};
  Vector total_[kColumnCount] = {};
  F32 zero_[kColumnCount];
  From from_;
};

}  // namespace jaxfp8::JAXFP8_ISA
