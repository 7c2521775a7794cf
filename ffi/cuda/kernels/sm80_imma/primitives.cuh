// What a block and its warps can do besides arithmetic: everything that `sm80_imma` needs PTX for.
//
// ffi/tests/cuda/simt.h has the same functions in software, and a host test runs the kernels on
// them as they are. So the kernels read and write shared memory through them alone.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_PRIMITIVES_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_PRIMITIVES_CUH_

#include <cstdint>

#ifdef __CUDACC__

#include "cuda/kernels/common/async_copy.cuh"

#define JAXFP8_DEVICE __device__ __forceinline__

namespace jaxfp8::cuda {

struct BlockIndex {
  int32_t x, y, z;
};

JAXFP8_DEVICE int ThreadIndex() { return static_cast<int>(threadIdx.x); }

JAXFP8_DEVICE BlockIndex ThisBlock() {
  return {static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.y),
          static_cast<int32_t>(blockIdx.z)};
}

JAXFP8_DEVICE void SyncThreads() { __syncthreads(); }

// The address of the shared memory that the launch asked for.
JAXFP8_DEVICE uint32_t DynamicShared() {
  extern __shared__ __align__(128) uint8_t imma_shared[];
  return SharedAddress(imma_shared);
}

// Loads and stores 1, 2 or 4 consecutive words, aligned to their size.
template <int kWords>
JAXFP8_DEVICE void LoadShared(uint32_t from, uint32_t (&to)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

template <int kWords>
JAXFP8_DEVICE void StoreShared(uint32_t to, const uint32_t (&from)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  if constexpr (kWords == 1) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(from[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(from[0]), "r"(from[1])
                 : "memory");
  } else {
    StoreShared16(to, from);
  }
}

// Four matrices of 8 rows of 16 bytes. Lanes 8i to 8i + 7 give the addresses of the rows of matrix
// i, and to[i] is bytes 4 (lane % 4) to 4 (lane % 4) + 3 of its row lane / 4.
JAXFP8_DEVICE void LoadMatrices(uint32_t row, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// acc (16 x 8, int32) += a (16 x 32, int8) * b (32 x 8, int8). With g = lane / 4 and t = lane % 4,
// a lane holds, the lowest K in the lowest byte,
//
//   a[0], a[1]      rows g and g + 8 of a,    K = 4t to 4t + 3
//   a[2], a[3]      rows g and g + 8 of a,    K = 4t + 16 to 4t + 19
//   b[0], b[1]      column g of b,            K = 4t to 4t + 3, and 4t + 16 to 4t + 19
//   acc[0], acc[1]  row g of acc,             columns 2t and 2t + 1
//   acc[2], acc[3]  row g + 8 of acc,         columns 2t and 2t + 1
JAXFP8_DEVICE void MultiplyCodes(int32_t (&acc)[4], const uint32_t (&a)[4],
                                 const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The largest value of the warp, for each of its lanes.
JAXFP8_DEVICE uint32_t MaxOfWarp(uint32_t value) { return __reduce_max_sync(~0u, value); }

// Loads 16 bytes of global memory, aligned to their size.
JAXFP8_DEVICE void LoadGlobal16(const void* from, uint32_t (&to)[4]) {
  const uint4 words = *static_cast<const uint4*>(from);
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}

// Stores four neighbouring sums to global memory, aligned to their size.
JAXFP8_DEVICE void StoreSums(int32_t* to, const int32_t (&sums)[4]) {
  *reinterpret_cast<int4*>(to) = make_int4(sums[0], sums[1], sums[2], sums[3]);
}

// Adds to four sums in global memory that other blocks add to.
JAXFP8_DEVICE void AddToSums(int32_t* to, const int32_t (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, sums[i]);
}

}  // namespace jaxfp8::cuda

#else  // a host test

#include "tests/cuda/simt.h"

#endif  // __CUDACC__

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_PRIMITIVES_CUH_
