// Products and sums of sizes given by a caller, without overflow.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

namespace jaxfp8 {

// Stands for every size that int64 does not hold: it is larger than any limit.
inline constexpr int64_t kTooLarge = std::numeric_limits<int64_t>::max();

// The most bytes that an array may have: a pebibyte, more than any machine has. Padding and dtypes
// multiply a size by less than 2^12, so int64 holds everything computed from accepted sizes.
inline constexpr int64_t kMaxBytes = int64_t{1} << 50;

// A quotient rounded up, and a size rounded up to a multiple.
constexpr int64_t DivideUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
constexpr int64_t RoundUp(int64_t size, int64_t unit) { return DivideUp(size, unit) * unit; }

// The product of two numbers >= 0; kTooLarge if int64 does not hold it.
constexpr int64_t Times(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kTooLarge : product;
}

// How many values an array of this shape has.
constexpr int64_t CountOf(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape) count = size == 0 ? 0 : Times(count, size);
  return count;
}

// The same with empty axes counted as 1. No stride, and no product of some of the axes, is larger.
constexpr int64_t ExtentOf(std::span<const int64_t> shape) {
  int64_t extent = 1;
  for (int64_t size : shape) extent = Times(extent, std::max<int64_t>(size, 1));
  return extent;
}

}  // namespace jaxfp8
