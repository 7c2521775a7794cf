// Thread block clusters (sm_90 and later): CTAs running at a time, with access to each other's
// shared memory. A kernel launched without a cluster is a cluster of one CTA.

#pragma once

#include <cstdint>

namespace jaxfp8::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

// A barrier of all threads of the cluster, in two halves. After the wait, all threads can read each
// thread's writes to shared memory from before its arrival.
__device__ __forceinline__ void ClusterArrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same without an order of accesses to memory: releasing them to a cluster takes a fence of the
// whole device.
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The rank of this CTA in its cluster, and the number of CTAs.
__device__ __forceinline__ uint32_t CtaInCluster() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ uint32_t CtasInCluster() {
  uint32_t count = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
  return count;
}

// Loads four floats from the shared memory of the CTA of a rank.
//   address  of the same place in this CTA
__device__ __forceinline__ float4 LoadFromRank(uint32_t address, int rank) {
  float4 value = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(there)
               : "memory");
#endif
  return value;
}

}  // namespace jaxfp8::cuda
