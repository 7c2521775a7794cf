// The scale of a tile.
//
//   scale = amax * float32(1 / highest), clipped to normal numbers; 1 where the amax is 0
//
// It may be rounded up to a power of two. The bits are those of jaxfp8/_value/scales.py.

#pragma once

#include <cfloat>
#include <cstdint>

#include "common/decode.h"
#include "common/dtype.h"
#include "common/platform.h"

namespace jaxfp8 {

// The largest finite value of an 8-bit type.
template <DType kOut>
inline constexpr float kHighest = kOut == DType::kE4M3   ? 448.0f
                                  : kOut == DType::kE5M2 ? 57344.0f
                                                         : 127.0f;

// The least normal power of two not below a positive number of up to 2^126. A number that is less
// than two ulp above one counts as it: the reciprocal in `ScaleOf` may be off by an ulp.
JAXFP8_HD float PowerOfTwoAbove(float scale) {
  constexpr float kSlack = 0x1.fffff8p-1f;  // 1 - 2^-22
  return FloatFromBits(((BitsOf(scale * kSlack) >> 23) + 1) << 23);
}

// The scale of a tile whose largest finite magnitude is `amax`.
template <DType kOut>
JAXFP8_HD float ScaleOf(float amax, bool power_of_two = false) {
  constexpr float kPer = 1.0f / kHighest<kOut>;
  const float scale = amax * kPer;
  const float normal = scale < FLT_MIN ? FLT_MIN : scale;
  const float rounded = power_of_two ? PowerOfTwoAbove(scale) : normal;
  return scale > 0.0f ? rounded : 1.0f;
}

}  // namespace jaxfp8
