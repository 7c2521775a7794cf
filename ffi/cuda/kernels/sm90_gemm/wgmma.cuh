// wgmma of two FP8 operands in shared memory (sm_90a): acc (64 x N) += lhs (64 x 32) * rhs (32 x
// N).

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_WGMMA_CUH_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_WGMMA_CUH_

#include <cstdint>

#include "common/dtype.h"
#include "cuda/kernels/common/wgmma.cuh"

namespace jaxfp8::cuda::sm90 {

// The descriptor of lines of 128 bytes in shared memory, as copied with a swizzle of 128 bytes:
// blocks of eight lines, 1024 bytes each. 32 bytes along K add 2 to it.
__device__ __forceinline__ uint64_t SwizzledDescriptor(uint32_t address) {
  constexpr uint64_t kEightLines = 1024 >> 4, kSwizzle128 = 1;
  return (address & 0x3ffffu) >> 4 | uint64_t{1} << 16 | kEightLines << 32 | kSwizzle128 << 62;
}

// Keeps the compiler from moving accesses to the accumulators across this point.
template <int kCount>
__device__ __forceinline__ void PinAccumulators(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Operands of the instruction: "%0, ..., %95" and the accumulators, sixteen at a time.
#define JAXFP8_TEXT_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JAXFP8_TEXT_1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JAXFP8_TEXT_2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define JAXFP8_TEXT_3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define JAXFP8_TEXT_4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define JAXFP8_TEXT_5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define JAXFP8_TEXTS_1 JAXFP8_TEXT_0
#define JAXFP8_TEXTS_2 JAXFP8_TEXTS_1 JAXFP8_TEXT_1
#define JAXFP8_TEXTS_4 JAXFP8_TEXTS_2 JAXFP8_TEXT_2 JAXFP8_TEXT_3
#define JAXFP8_TEXTS_6 JAXFP8_TEXTS_4 JAXFP8_TEXT_4 JAXFP8_TEXT_5
#define JAXFP8_FOUR(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define JAXFP8_ACC_1(i) JAXFP8_FOUR(i), JAXFP8_FOUR(i + 4), JAXFP8_FOUR(i + 8), JAXFP8_FOUR(i + 12)
#define JAXFP8_ACC_2(i) JAXFP8_ACC_1(i), JAXFP8_ACC_1(i + 16)
#define JAXFP8_ACC_4(i) JAXFP8_ACC_2(i), JAXFP8_ACC_2(i + 32)
#define JAXFP8_ACC_6(i) JAXFP8_ACC_4(i), JAXFP8_ACC_2(i + 64)

// One shape: its columns, its accumulators in sixteens, the numbers of the three operands after
// them: descriptors of lhs and rhs, and whether it adds to the accumulators.
#define JAXFP8_WGMMA(columns, sixteens, a, b, p, types)                             \
  if constexpr (kColumns == columns) {                                              \
    asm volatile("{.reg .pred q; setp.ne.b32 q, " p                                 \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32." types \
                 " {" JAXFP8_TEXTS_##sixteens "}, " a ", " b ", q, 1, 1;}"          \
                 : JAXFP8_ACC_##sixteens(0)                                         \
                 : "l"(lhs), "l"(rhs), "r"(accumulate));                            \
  }
// All shapes of a pair of types.
#define JAXFP8_WGMMA_OF(lhs_type, rhs_type, types)                    \
  if constexpr (kLhs == DType::lhs_type && kRhs == DType::rhs_type) { \
    JAXFP8_WGMMA(32, 1, "%16", "%17", "%18", types)                   \
    JAXFP8_WGMMA(64, 2, "%32", "%33", "%34", types)                   \
    JAXFP8_WGMMA(128, 4, "%64", "%65", "%66", types)                  \
    JAXFP8_WGMMA(192, 6, "%96", "%97", "%98", types)                  \
  }

// acc = lhs * rhs + (accumulate ? acc : 0), asynchronously.
//   kColumns  columns of rhs; a thread has kColumns / 2 accumulators, those of column c at
//             acc[c / 8 * 4]: two columns of row `lane / 4` of its warp's 16, then of that + 8
//   lhs, rhs  from `SwizzledDescriptor`
template <DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void Wgmma(float (&acc)[kColumns / 2], uint64_t lhs, uint64_t rhs,
                                      uint32_t accumulate) {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128 || kColumns == 192);
  JAXFP8_WGMMA_OF(kE4M3, kE4M3, "e4m3.e4m3")
  JAXFP8_WGMMA_OF(kE4M3, kE5M2, "e4m3.e5m2")
  JAXFP8_WGMMA_OF(kE5M2, kE4M3, "e5m2.e4m3")
  JAXFP8_WGMMA_OF(kE5M2, kE5M2, "e5m2.e5m2")
}

#undef JAXFP8_WGMMA_OF
#undef JAXFP8_WGMMA
#undef JAXFP8_ACC_6
#undef JAXFP8_ACC_4
#undef JAXFP8_ACC_2
#undef JAXFP8_ACC_1
#undef JAXFP8_FOUR
#undef JAXFP8_TEXTS_6
#undef JAXFP8_TEXTS_4
#undef JAXFP8_TEXTS_2
#undef JAXFP8_TEXTS_1
#undef JAXFP8_TEXT_5
#undef JAXFP8_TEXT_4
#undef JAXFP8_TEXT_3
#undef JAXFP8_TEXT_2
#undef JAXFP8_TEXT_1
#undef JAXFP8_TEXT_0

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_WGMMA_CUH_
