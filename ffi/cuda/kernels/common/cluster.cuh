// Thread block clusters (sm_90 and later): blocks that run at a time and read each other's shared
// memory. A kernel launched without a cluster is a cluster of one block.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_CLUSTER_CUH_
#define JAXFP8_CUDA_KERNELS_COMMON_CLUSTER_CUH_

#include <cstdint>

namespace jaxfp8::cuda {

// A barrier of all threads of the cluster, in two halves. Arriving orders no accesses to memory:
// releasing them to a cluster takes a fence of the whole device.
__device__ __forceinline__ void ClusterArriveRelaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The rank of this block in its cluster, and the number of blocks.
__device__ __forceinline__ uint32_t BlockInCluster() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ uint32_t BlocksInCluster() {
  uint32_t count = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
  return count;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_CLUSTER_CUH_
