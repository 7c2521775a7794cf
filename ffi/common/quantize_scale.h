// The scale of a tile.
//
//   scale = amax * float32(1 / highest), clipped to normal numbers; 1 where the amax is 0

#pragma once

#include <cfloat>

#include "common/dtype.h"
#include "common/platform.h"

namespace jaxfp8 {

// The largest finite value of an 8-bit type.
template <DType kOut>
inline constexpr float kHighest = kOut == DType::kE4M3   ? 448.0f
                                  : kOut == DType::kE5M2 ? 57344.0f
                                                         : 127.0f;

// The scale of a tile whose largest finite magnitude is `amax`.
template <DType kOut>
JAXFP8_HD float ScaleOf(float amax) {
  constexpr float kPer = 1.0f / kHighest<kOut>;
  const float scale = amax * kPer;
  const float normal = scale < FLT_MIN ? FLT_MIN : scale;
  return scale > 0.0f ? normal : 1.0f;
}

}  // namespace jaxfp8
