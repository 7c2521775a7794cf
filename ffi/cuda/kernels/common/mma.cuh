// The tensor core instruction of a warp (mma.sync, sm_80 and later).

#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8::cuda {

// acc (16 x 8) += a (16 x 16) * b (16 x 8). With g = lane / 4 and t = lane % 4, a lane holds
//
//   a[0], a[1]      rows g and g + 8 of a,    K = 2t and 2t + 1
//   a[2], a[3]      rows g and g + 8 of a,    K = 2t + 8 and 2t + 9
//   b0              column g of b,            K = 2t and 2t + 1
//   b1              column g of b,            K = 2t + 8 and 2t + 9
//   acc[0], acc[1]  row g of acc,             columns 2t and 2t + 1
//   acc[2], acc[3]  row g + 8 of acc,         columns 2t and 2t + 1
//
//   kWide  type of a and b: bfloat16 or float16
template <DType kWide>
__device__ __forceinline__ void Mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  static_assert(kWide == DType::kBF16 || kWide == DType::kF16);
  if constexpr (kWide == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace jaxfp8::cuda
