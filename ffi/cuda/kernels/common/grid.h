// Grid dimensions from 64-bit counts.

#pragma once

#include <cstdint>

namespace jaxfp8::cuda {

// A number of blocks as a grid dimension. If it is too large, returns 0: every launch refuses 0.
inline unsigned GridSize(int64_t blocks) {
  return blocks < 0 || blocks >> 31 ? 0 : static_cast<unsigned>(blocks);
}

}  // namespace jaxfp8::cuda
