// The index of a value's scale and zero point. It avoids the 64-bit divisions of `Tiles::At`: each
// takes a hundred instructions.

#pragma once

#include <cstdint>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

#ifdef __CUDACC__

// Most tiles have size 1, and most indices fit 32 bits.
__device__ __forceinline__ int64_t TileOf(int64_t index, int64_t size) {
  if (size == 1) return index;
  if (((index | size) >> 32) == 0) {
    return static_cast<uint32_t>(index) / static_cast<uint32_t>(size);
  }
  return index / size;
}

// The same as `Tiles::At`.
__device__ __forceinline__ int64_t TileAt(const Tiles& t, int64_t b, int64_t f, int64_t k) {
  int64_t at = b * t.batch_stride;
  if (t.free_stride != 0) at += TileOf(f, t.tile_free) * t.free_stride;
  if (t.depth_stride != 0) at += TileOf(k, t.tile_depth) * t.depth_stride;
  return at;
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
