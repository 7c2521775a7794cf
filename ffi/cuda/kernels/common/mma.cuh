// The tensor core instruction of sm_80, which every later GPU has too.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_MMA_CUH_
#define JAXFP8_CUDA_KERNELS_COMMON_MMA_CUH_

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8::cuda {

// sum (16 x 8) += a (16 x 16) * b (16 x 8). With g = lane / 4 and t = lane % 4, a lane holds
//   a[0], a[1]  rows g and g + 8 of a, depths 2t and 2t + 1;  a[2], a[3]  the same rows, depths + 8
//   b[0]        column g of b, depths 2t and 2t + 1;          b[1]        depths + 8
//   sum[0], sum[1]  row g, columns 2t and 2t + 1;             sum[2], sum[3]  row g + 8.
template <DType kWide>
__device__ __forceinline__ void Mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  static_assert(kWide == DType::kBF16 || kWide == DType::kF16);
  if constexpr (kWide == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_MMA_CUH_
