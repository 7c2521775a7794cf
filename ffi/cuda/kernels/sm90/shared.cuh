// Loads and stores of shared memory by its 32-bit address.

#pragma once

#include <cstdint>

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/sm90/block.h"

namespace jaxfp8::cuda::sm90 {

// Address of the first swizzled tile in a CTA's dynamic shared memory.
__device__ __forceinline__ uint32_t FirstTile(const void* shared_memory) {
  return (SharedAddress(shared_memory) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
}

__device__ __forceinline__ float LoadShared(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void StoreShared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t to, int32_t value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t LoadShared16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void StoreShared2(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint4 LoadShared4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ int4 LoadInts(uint32_t from) {
  const uint4 v = LoadShared4(from);
  return make_int4(static_cast<int32_t>(v.x), static_cast<int32_t>(v.y), static_cast<int32_t>(v.z),
                   static_cast<int32_t>(v.w));
}
__device__ __forceinline__ void StoreShared4(uint32_t to, int32_t a, int32_t b, int32_t c,
                                             int32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jaxfp8::cuda::sm90
