// The tensor core instruction of four warps (wgmma, sm_90a only).

#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8::cuda {

// On the host, code compiled for compute capability 9.0 counts as code with wgmma. Code for sm_90
// without wgmma must therefore not be built.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a (JAXFP8_CUDA_ARCHITECTURES=90a-real), not for sm_90"
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

// The descriptor of a matrix in shared memory: rows of 128 bytes, in groups of eight rows (1024
// bytes), aligned to 1024. In row r, chunk c of 16 bytes is at place c ^ r % 8.
//   address  of the first byte along K: any multiple of 32 in the first row
//
// Its low word has the address, in units of 16 bytes. Steps may be added to this word alone: 2 for
// 32 bytes along K.
__device__ __forceinline__ uint32_t DescriptorWord(uint32_t address) {
  return (address & 0x3ffffu) >> 4 | 1u << 16;
}
__device__ __forceinline__ uint64_t DescriptorOf(uint32_t word) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroupStride = uint64_t{1024 >> 4} << 32;
  return word | kGroupStride | kSwizzle128;
}
__device__ __forceinline__ uint64_t SwizzledMatrixDescriptor(uint32_t address) {
  return DescriptorOf(DescriptorWord(address));
}

// Makes this thread's copies into shared memory visible to wgmma.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Forces the value to be computed before this point of the program.
__device__ __forceinline__ void PinRegister(uint32_t& value) {
  asm volatile("" : "+r"(value)::"memory");
}
// Needed between writing registers and the first wgmma with these registers as operands.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the last kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operands of the instruction: the accumulators of 8 columns, and the 16 or 32 registers of all.
#define JAXFP8_ACC(n) "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
#define JAXFP8_REGISTERS_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JAXFP8_REGISTERS_64 \
  JAXFP8_REGISTERS_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
// a, b and `adds` are the operands after the accumulators. The accumulators are the variadic
// arguments.
#define JAXFP8_WGMMA(shape, type, registers, a_and_b, adds, ...)                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " adds                                      \
               ", 0; "                                                                    \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers \
               "}, " a_and_b ", p, 1, 1, 0;}"                                             \
               : __VA_ARGS__                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0))

template <DType kWide, bool kAdds>
__device__ __forceinline__ void WgmmaOf32(float (&acc)[4][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kWide == DType::kBF16) {
    JAXFP8_WGMMA("m64n32k16", "bf16", JAXFP8_REGISTERS_32, "{%16,%17,%18,%19}, %20", "%21",
                 JAXFP8_ACC(0), JAXFP8_ACC(1), JAXFP8_ACC(2), JAXFP8_ACC(3));
  } else {
    JAXFP8_WGMMA("m64n32k16", "f16", JAXFP8_REGISTERS_32, "{%16,%17,%18,%19}, %20", "%21",
                 JAXFP8_ACC(0), JAXFP8_ACC(1), JAXFP8_ACC(2), JAXFP8_ACC(3));
  }
}

template <DType kWide, bool kAdds>
__device__ __forceinline__ void WgmmaOf64(float (&acc)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kWide == DType::kBF16) {
    JAXFP8_WGMMA("m64n64k16", "bf16", JAXFP8_REGISTERS_64, "{%32,%33,%34,%35}, %36", "%37",
                 JAXFP8_ACC(0), JAXFP8_ACC(1), JAXFP8_ACC(2), JAXFP8_ACC(3), JAXFP8_ACC(4),
                 JAXFP8_ACC(5), JAXFP8_ACC(6), JAXFP8_ACC(7));
  } else {
    JAXFP8_WGMMA("m64n64k16", "f16", JAXFP8_REGISTERS_64, "{%32,%33,%34,%35}, %36", "%37",
                 JAXFP8_ACC(0), JAXFP8_ACC(1), JAXFP8_ACC(2), JAXFP8_ACC(3), JAXFP8_ACC(4),
                 JAXFP8_ACC(5), JAXFP8_ACC(6), JAXFP8_ACC(7));
  }
}

#undef JAXFP8_WGMMA
#undef JAXFP8_REGISTERS_64
#undef JAXFP8_REGISTERS_32
#undef JAXFP8_ACC

// acc (64 x 8 * kRowFragments) += a (64 x 16) * b (16 x 8 * kRowFragments), asynchronously. A warp
// holds 16 rows of a and of acc, in the fragments of `Mma`; b is a descriptor.
//   kWide          type of a and b: bfloat16 or float16
//   kRowFragments  columns of b in units of 8: 4 or 8
//   kAdds          whether it adds to acc; else it overwrites acc
template <DType kWide, int kRowFragments, bool kAdds = true>
__device__ __forceinline__ void Wgmma(float (&acc)[kRowFragments][4], const uint32_t (&a)[4],
                                      uint64_t b) {
  static_assert(kRowFragments == 4 || kRowFragments == 8);
  if constexpr (kRowFragments == 4) {
    WgmmaOf32<kWide, kAdds>(acc, a, b);
  } else {
    WgmmaOf64<kWide, kAdds>(acc, a, b);
  }
}

}  // namespace jaxfp8::cuda
