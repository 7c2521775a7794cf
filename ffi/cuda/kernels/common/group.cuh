// Sums and maxima over the threads of a row.

#pragma once

#include <cstdint>

namespace jaxfp8::cuda {

// Reduces a value over the `group` threads, 32 to 1024, of one threadIdx.x / group. Every thread of
// the CTA must call it.
//   shared         a word per warp, no longer read by anyone
//   reduce_warp    reduces over a warp, for all its lanes; 0 is neutral
template <typename T, typename ReduceWarp>
__device__ __forceinline__ T ReduceGroup(T value, int group, T* shared, ReduceWarp reduce_warp) {
  value = reduce_warp(value);
  if (group == 32) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = group / 32, first = threadIdx.x / group * warps;
  const int lane = threadIdx.x % 32;
  return reduce_warp(lane < warps ? shared[first + lane] : T{0});
}

__device__ __forceinline__ uint32_t MaxOfGroup(uint32_t value, int group, uint32_t* shared) {
  return ReduceGroup(value, group, shared, [](uint32_t x) { return __reduce_max_sync(~0u, x); });
}

// Sums in one order.
__device__ __forceinline__ float SumOfGroup(float value, int group, float* shared) {
  return ReduceGroup(value, group, shared, [](float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
  });
}

}  // namespace jaxfp8::cuda
