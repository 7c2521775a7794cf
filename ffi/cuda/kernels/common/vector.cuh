// Loads and stores short runs of elements with the widest aligned accesses.

#pragma once

#include <cstdint>
#include <initializer_list>

#include "cuda/kernels/common/element.cuh"

namespace jaxfp8::cuda {

// The widest access aligned at a pointer and at every offset of multiples of `steps` (in bytes):
// 16, 8, 4, 2 or 1.
inline int AlignmentOf(const void* pointer, std::initializer_list<int64_t> steps) {
  uint64_t bits = 16 | reinterpret_cast<uint64_t>(pointer);
  for (int64_t step : steps) bits |= static_cast<uint64_t>(step);
  return static_cast<int>(bits & (~bits + 1));
}

#ifdef __CUDACC__

// Loads kWords words. `alignment` is in bytes, from `AlignmentOf`.
template <int kWords>
__device__ __forceinline__ void LoadWords(const void* from, int alignment, uint32_t (&to)[kWords]) {
  if (kWords % 4 == 0 && alignment >= 16) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 part = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = part.x, to[4 * i + 1] = part.y, to[4 * i + 2] = part.z, to[4 * i + 3] = part.w;
    }
  } else if (kWords % 2 == 0 && alignment >= 8) {
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      const uint2 part = reinterpret_cast<const uint2*>(from)[i];
      to[2 * i] = part.x, to[2 * i + 1] = part.y;
    }
  } else if (alignment >= 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else if (alignment >= 2) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      to[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
    }
  } else {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      to[i] = bytes[4 * i] | static_cast<uint32_t>(bytes[4 * i + 1]) << 8 |
              static_cast<uint32_t>(bytes[4 * i + 2]) << 16 |
              static_cast<uint32_t>(bytes[4 * i + 3]) << 24;
    }
  }
}

// Loads the first `count` elements of a run, one by one, and zeros after them.
template <typename Element, int kWords>
__device__ __forceinline__ void LoadSome(const Element* from, int64_t count,
                                         uint32_t (&to)[kWords]) {
  constexpr int kPer = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    to[i] = 0;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if (kPer * i + j < count) {
        to[i] |= static_cast<uint32_t>(from[kPer * i + j]) << (8 * sizeof(Element) * j);
      }
    }
  }
}

// Loads the first `count` elements of a run, with zeros after them.
template <typename Element, int kWords>
__device__ __forceinline__ void LoadRun(const Element* from, int64_t count, int alignment,
                                        uint32_t (&to)[kWords]) {
  if (count >= static_cast<int64_t>(kWords * 4 / sizeof(Element))) {
    LoadWords(from, alignment, to);
  } else {
    LoadSome(from, count, to);
  }
}

// Stores the first `count` elements of a run.
template <typename Element, int kWords>
__device__ __forceinline__ void StoreRun(Element* to, int64_t count, int alignment,
                                         const uint32_t (&from)[kWords]) {
  constexpr int kPer = 4 / sizeof(Element);
  const bool whole = count >= kWords * kPer;
  if (whole && kWords % 4 == 0 && alignment >= 16) {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      reinterpret_cast<uint4*>(to)[i] =
          make_uint4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
    }
  } else if (whole && kWords % 2 == 0 && alignment >= 8) {
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) {
      reinterpret_cast<uint2*>(to)[i] = make_uint2(from[2 * i], from[2 * i + 1]);
    }
  } else if (whole && alignment >= 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(to)[i] = from[i];
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (kPer * i + j < count) {
          to[kPer * i + j] = static_cast<Element>(from[i] >> (8 * sizeof(Element) * j));
        }
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
