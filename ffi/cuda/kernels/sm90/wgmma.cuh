// wgmma (sm_90a): acc (64 x N) += lhs (64 x 32 bytes) * rhs (32 bytes x N). Two 8-bit operands are
// in shared memory; FP8 is summed in float32, int8 and uint8 in int32. Of two 16-bit ones lhs is in
// registers.

#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/kernels/common/wgmma.cuh"

namespace jaxfp8::cuda::sm90 {

// Keeps the compiler from moving accesses to the accumulators across this point.
template <int kCount>
__device__ __forceinline__ void PinAccumulators(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void PinAccumulators(int32_t (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(acc[i])::"memory");
}

// Operands of the instruction: "%0, ..., %127" and the accumulators, sixteen at a time. `c` is the
// constraint of an accumulator: "+f" or "+r".
#define JAXFP8_TEXT_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JAXFP8_TEXT_1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JAXFP8_TEXT_2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define JAXFP8_TEXT_3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define JAXFP8_TEXT_4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define JAXFP8_TEXT_5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define JAXFP8_TEXT_6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define JAXFP8_TEXT_7 \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define JAXFP8_TEXTS_1 JAXFP8_TEXT_0
#define JAXFP8_TEXTS_2 JAXFP8_TEXTS_1 JAXFP8_TEXT_1
#define JAXFP8_TEXTS_4 JAXFP8_TEXTS_2 JAXFP8_TEXT_2 JAXFP8_TEXT_3
#define JAXFP8_TEXTS_6 JAXFP8_TEXTS_4 JAXFP8_TEXT_4 JAXFP8_TEXT_5
#define JAXFP8_TEXTS_8 JAXFP8_TEXTS_6 JAXFP8_TEXT_6 JAXFP8_TEXT_7
#define JAXFP8_FOUR(c, i) c(acc[i]), c(acc[i + 1]), c(acc[i + 2]), c(acc[i + 3])
#define JAXFP8_ACC_1(c, i) \
  JAXFP8_FOUR(c, i), JAXFP8_FOUR(c, i + 4), JAXFP8_FOUR(c, i + 8), JAXFP8_FOUR(c, i + 12)
#define JAXFP8_ACC_2(c, i) JAXFP8_ACC_1(c, i), JAXFP8_ACC_1(c, i + 16)
#define JAXFP8_ACC_4(c, i) JAXFP8_ACC_2(c, i), JAXFP8_ACC_2(c, i + 32)
#define JAXFP8_ACC_6(c, i) JAXFP8_ACC_4(c, i), JAXFP8_ACC_2(c, i + 64)
#define JAXFP8_ACC_8(c, i) JAXFP8_ACC_4(c, i), JAXFP8_ACC_4(c, i + 64)

// One shape: its columns, its accumulators in sixteens, the numbers of the three operands after
// them: descriptors of lhs and rhs, and whether it adds to the accumulators. Products of floats
// have factors of 1 after those.
#define JAXFP8_WGMMA(columns, sixteens, a, b, p, types, factors, c)             \
  if constexpr (kColumns == columns) {                                          \
    asm volatile("{.reg .pred q; setp.ne.b32 q, " p                             \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k32." types \
                 " {" JAXFP8_TEXTS_##sixteens "}, " a ", " b ", q" factors ";}" \
                 : JAXFP8_ACC_##sixteens(c, 0)                                  \
                 : "l"(lhs), "l"(rhs), "r"(accumulate));                        \
  }
// All shapes of a pair of types.
#define JAXFP8_WGMMA_OF(types, factors, c)                     \
  JAXFP8_WGMMA(32, 1, "%16", "%17", "%18", types, factors, c)  \
  JAXFP8_WGMMA(64, 2, "%32", "%33", "%34", types, factors, c)  \
  JAXFP8_WGMMA(128, 4, "%64", "%65", "%66", types, factors, c) \
  JAXFP8_WGMMA(192, 6, "%96", "%97", "%98", types, factors, c) \
  JAXFP8_WGMMA(256, 8, "%128", "%129", "%130", types, factors, c)
#define JAXFP8_WGMMA_FLOAT(lhs_type, rhs_type, types)                 \
  if constexpr (kLhs == DType::lhs_type && kRhs == DType::rhs_type) { \
    JAXFP8_WGMMA_OF("f32." types, ", 1, 1", "+f")                     \
  }
#define JAXFP8_WGMMA_INT(lhs_type, rhs_type, types)                   \
  if constexpr (kLhs == DType::lhs_type && kRhs == DType::rhs_type) { \
    JAXFP8_WGMMA_OF("s32." types, "", "+r")                           \
  }

// acc = lhs * rhs + (accumulate ? acc : 0), asynchronously.
//   kColumns  columns of rhs; a thread has kColumns / 2 accumulators, those of column c at
//             acc[c / 8 * 4]: two columns of row `lane / 4` of its warp's 16, then of that + 8
//   lhs, rhs  descriptors
template <DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void Wgmma(float (&acc)[kColumns / 2], uint64_t lhs, uint64_t rhs,
                                      uint32_t accumulate) {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128 || kColumns == 192 ||
                kColumns == 256);
  JAXFP8_WGMMA_FLOAT(kE4M3, kE4M3, "e4m3.e4m3")
  JAXFP8_WGMMA_FLOAT(kE4M3, kE5M2, "e4m3.e5m2")
  JAXFP8_WGMMA_FLOAT(kE5M2, kE4M3, "e5m2.e4m3")
  JAXFP8_WGMMA_FLOAT(kE5M2, kE5M2, "e5m2.e5m2")
}
// The same of int8 and uint8. Sums wrap around at 2^31.
template <DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void Wgmma(int32_t (&acc)[kColumns / 2], uint64_t lhs, uint64_t rhs,
                                      uint32_t accumulate) {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128 || kColumns == 256);
  JAXFP8_WGMMA_INT(kS8, kS8, "s8.s8")
  JAXFP8_WGMMA_INT(kS8, kU8, "s8.u8")
  JAXFP8_WGMMA_INT(kU8, kS8, "u8.s8")
  JAXFP8_WGMMA_INT(kU8, kU8, "u8.u8")
}

// One shape with lhs in registers: the numbers of its four, of the descriptor of rhs, and a type.
#define JAXFP8_WGMMA_RS(columns, sixteens, a, b, type)                                            \
  if constexpr (kColumns == columns) {                                                            \
    asm volatile("{.reg .pred q; setp.ne.b32 q, 1, 0; wgmma.mma_async.sync.aligned.m64n" #columns \
                 "k16.f32." type "." type " {" JAXFP8_TEXTS_##sixteens "}, {" a "}, " b           \
                                                                       ", q, 1, 1, 0;}"           \
                 : JAXFP8_ACC_##sixteens("+f", 0)                                                 \
                 : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs));                 \
  }
#define JAXFP8_WGMMA_RS_OF(type)                              \
  JAXFP8_WGMMA_RS(128, 4, "%64, %65, %66, %67", "%68", type)  \
  JAXFP8_WGMMA_RS(192, 6, "%96, %97, %98, %99", "%100", type) \
  JAXFP8_WGMMA_RS(256, 8, "%128, %129, %130, %131", "%132", type)

// acc += lhs (64 x 16) * rhs (16 x kColumns), asynchronously.
//   kWide  of both operands: bfloat16 or float16
//   lhs    rows `lane / 4` and that + 8 of the warp's 16, at K of 2 * (lane % 4), then that + 8
template <DType kWide, int kColumns>
__device__ __forceinline__ void WgmmaFromRegisters(float (&acc)[kColumns / 2],
                                                   const uint32_t (&lhs)[4], uint64_t rhs) {
  static_assert(kColumns == 128 || kColumns == 192 || kColumns == 256);
  if constexpr (kWide == DType::kBF16) {
    JAXFP8_WGMMA_RS_OF("bf16")
  } else {
    JAXFP8_WGMMA_RS_OF("f16")
  }
}

#undef JAXFP8_WGMMA_RS_OF
#undef JAXFP8_WGMMA_RS
#undef JAXFP8_WGMMA_INT
#undef JAXFP8_WGMMA_FLOAT
#undef JAXFP8_WGMMA_OF
#undef JAXFP8_WGMMA
#undef JAXFP8_ACC_8
#undef JAXFP8_ACC_6
#undef JAXFP8_ACC_4
#undef JAXFP8_ACC_2
#undef JAXFP8_ACC_1
#undef JAXFP8_FOUR
#undef JAXFP8_TEXTS_8
#undef JAXFP8_TEXTS_6
#undef JAXFP8_TEXTS_4
#undef JAXFP8_TEXTS_2
#undef JAXFP8_TEXTS_1
#undef JAXFP8_TEXT_7
#undef JAXFP8_TEXT_6
#undef JAXFP8_TEXT_5
#undef JAXFP8_TEXT_4
#undef JAXFP8_TEXT_3
#undef JAXFP8_TEXT_2
#undef JAXFP8_TEXT_1
#undef JAXFP8_TEXT_0

}  // namespace jaxfp8::cuda::sm90
