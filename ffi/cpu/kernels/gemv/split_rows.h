// Rows of bytes less their zero points, in two bytes each, for products of bytes.

#ifndef JAXFP8_CPU_KERNELS_GEMV_SPLIT_ROWS_H_
#define JAXFP8_CPU_KERNELS_GEMV_SPLIT_ROWS_H_

#include <algorithm>
#include <cstring>

#include "cpu/kernels/gemv/gemv_kn_loops.h"
#include "cpu/kernels/kernel.h"

namespace jaxfp8::JAXFP8_ISA {

// Rows of bytes less their zero points, which take nine bits: first what a byte holds of a value,
// kCount rows further what is left of it, which is mostly 0.
template <int kCount>
class RowParts {
 public:
  RowParts(const Panel& left, int64_t depth) : depth_(depth) {
    for (int r = 0; r < kCount; ++r) {
      const auto* row = reinterpret_cast<const int8_t*>(left.data + r * left.pitch);
      Split(row, left.zero[r], parts_[r], parts_[kCount + r]);
    }
    if (!fit_) return;
    const auto* rows = reinterpret_cast<const uint8_t*>(parts_[0]);
    for (int64_t k = 0; k < depth; k += kLinesTogether) {
      second_ += !IsFirstOnly<kCount>(rows + k, kPitch);
    }
  }

  // Whether two bytes hold every value, and the second are so rare that they cost less than sums of
  // the columns do, which take as long as a row and a half.
  bool Pay() const { return fit_ && 2 * second_ * kCount * kLinesTogether <= 3 * depth_; }

  Panel WithFactorsOf(const Panel& left) {
    return {
        reinterpret_cast<uint8_t*>(parts_[0]), kPitch, left.scale, left.zero, left.sum, left.raw};
  }

 private:
  // The odd cache line keeps rows from falling on the same sets.
  static constexpr int64_t kPitch = kFewDepth + 64;

  typedef int8_t Bytes __attribute__((vector_size(kBytes / 2)));
  typedef int16_t Words __attribute__((vector_size(kBytes)));
  static constexpr int64_t kLength = sizeof(Bytes);

  void Split(const int8_t* row, double zero, int8_t* first, int8_t* rest) {
    fit_ &= zero >= -255 && zero <= 255;
    if (!fit_) return;
    const auto offset = static_cast<int16_t>(zero);
    const int64_t whole = depth_ / kLength * kLength;
    Words beyond{};
    const auto split = [&](const int8_t* from, int64_t k) {
      const Words value = __builtin_convertvector(Load<Bytes>(from), Words) - offset;
      const Words near = value < -128 ? Words{} - 128 : value > 127 ? Words{} + 127 : value;
      const Words left = value - near;
      beyond |= (left < -128) | (left > 127);
      Store(first + k, __builtin_convertvector(near, Bytes));
      Store(rest + k, __builtin_convertvector(left, Bytes));
    };
    for (int64_t k = 0; k < whole; k += kLength) split(row + k, k);
    if (whole < depth_) {
      // What meets columns of zeros needs no second part.
      int8_t last[kLength];
      std::fill_n(last, kLength, std::clamp<int16_t>(offset, -128, 127));
      std::memcpy(last, row + whole, depth_ - whole);
      split(last, whole);
    }
    for (int i = 0; i < kLength; ++i) fit_ &= beyond[i] == 0;
  }

  int64_t depth_;
  alignas(64) int8_t parts_[2 * kCount][kPitch];
  bool fit_ = true;
  int64_t second_ = 0;  // lots of lines read together that need second parts
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMV_SPLIT_ROWS_H_
