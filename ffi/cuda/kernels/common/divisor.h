// Division by a number known before the launch, as a multiplication and a shift.

#pragma once

#include <cstdint>

#include "common/platform.h"

namespace jaxfp8::cuda {

// Divides numbers below 2^31 by `divisor`, from 1 to 2^31 - 1, rounding down. Take a shift s with
// 2^s >= divisor and the multiplier m = ceil(2^(32 + s) / divisor). Then n m / 2^(32 + s) exceeds n
// / divisor by less than n / 2^32, and thus by less than 1 / divisor (Granlund and Montgomery,
// 1994). m has 33 bits; `multiplier` is without the highest.
struct Divisor {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t by) : divisor(static_cast<uint32_t>(by)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    const uint64_t above = (uint64_t{1} << shift) - divisor;
    multiplier = static_cast<uint32_t>(((above << 32) + divisor - 1) / divisor);
  }

  JAXFP8_HD int32_t Quotient(int32_t n) const {
    const auto value = static_cast<uint32_t>(n);
    const auto high = static_cast<uint32_t>(uint64_t{multiplier} * value >> 32);
    return static_cast<int32_t>((high + value) >> shift);
  }
};

}  // namespace jaxfp8::cuda
