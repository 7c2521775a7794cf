// Loads and stores of shared memory by its 32-bit address.

#ifndef JAXFP8_CUDA_KERNELS_SM90_SHARED_CUH_
#define JAXFP8_CUDA_KERNELS_SM90_SHARED_CUH_

#include <cstdint>

namespace jaxfp8::cuda::sm90 {

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

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_SHARED_CUH_
