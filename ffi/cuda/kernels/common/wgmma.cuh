// The tensor core instruction of a warpgroup (sm_90a): 64 x 8 * kEights sums by four warps.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_WGMMA_CUH_
#define JAXFP8_CUDA_KERNELS_COMMON_WGMMA_CUH_

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8::cuda {

// The host takes any code of Hopper's for code with the instruction: there is to be no other.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a (JAXFP8_CUDA_ARCHITECTURES=90a-real), not for sm_90"
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWarpgroupMma = true;
#else
inline constexpr bool kHasWarpgroupMma = false;
#endif

// A matrix in shared memory as the instruction wants it told: blocks of eight rows of 16 bytes, the
// second half of the depth `depth_stride` bytes from the first, the next eight rows `row_stride`.
__device__ __forceinline__ uint64_t MatrixAt(uint32_t address, uint32_t depth_stride,
                                             uint32_t row_stride) {
  return (address & 0x3ffffu) >> 4 | uint64_t{depth_stride >> 4} << 16 |
         uint64_t{row_stride >> 4} << 32;
}

// What this thread's copies put into shared memory becomes visible to the instruction.
__device__ __forceinline__ void ShowToWarpgroupMma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The value is made before this point of the program.
__device__ __forceinline__ void KeepInRegister(uint32_t& value) {
  asm volatile("" : "+r"(value)::"memory");
}
// Before the first instruction after registers were written.
__device__ __forceinline__ void FenceWarpgroup() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitWarpgroup() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void WaitForWarpgroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// sums (64 x 8 * kEights) += a (64 x 16) * b (16 x 8 * kEights), asynchronously. A warp holds 16
// rows of `a` and of the sums, in the fragments of `Mma`.
template <DType kWide, int kEights>
__device__ __forceinline__ void WarpgroupMma(float (&sums)[kEights][4], const uint32_t (&a)[4],
                                             uint64_t b) {
  static_assert(kEights == 4 || kEights == 8);
  if constexpr (kEights == 4) {
    if constexpr (kWide == DType::kBF16) {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, 1, 0; "
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
          "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
          "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
          : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
            "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
            "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
            "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, 1, 0; "
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
          "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
          "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
          : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
            "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
            "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
            "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
  } else {
    if constexpr (kWide == DType::kBF16) {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, 1, 0; "
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
          "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
          "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
          "{%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
          : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
            "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
            "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
            "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]),
            "+f"(sums[4][0]), "+f"(sums[4][1]), "+f"(sums[4][2]), "+f"(sums[4][3]),
            "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
            "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]),
            "+f"(sums[7][0]), "+f"(sums[7][1]), "+f"(sums[7][2]), "+f"(sums[7][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
      asm volatile(
          "{.reg .pred p; setp.ne.b32 p, 1, 0; "
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
          "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
          "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
          "{%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
          : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3]),
            "+f"(sums[1][0]), "+f"(sums[1][1]), "+f"(sums[1][2]), "+f"(sums[1][3]),
            "+f"(sums[2][0]), "+f"(sums[2][1]), "+f"(sums[2][2]), "+f"(sums[2][3]),
            "+f"(sums[3][0]), "+f"(sums[3][1]), "+f"(sums[3][2]), "+f"(sums[3][3]),
            "+f"(sums[4][0]), "+f"(sums[4][1]), "+f"(sums[4][2]), "+f"(sums[4][3]),
            "+f"(sums[5][0]), "+f"(sums[5][1]), "+f"(sums[5][2]), "+f"(sums[5][3]),
            "+f"(sums[6][0]), "+f"(sums[6][1]), "+f"(sums[6][2]), "+f"(sums[6][3]),
            "+f"(sums[7][0]), "+f"(sums[7][1]), "+f"(sums[7][2]), "+f"(sums[7][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_WGMMA_CUH_
