// JAXFP8_HD marks functions that CPU kernels, CUDA kernels and host tests share.
//
// Kernel files are compiled once per instruction set. If the compiler did not inline a shared
// function, the linker would keep one of its copies, maybe one that needs AVX-512, for every
// machine. So every shared function is always inlined.

#pragma once

#ifdef __CUDACC__
#define JAXFP8_HD __host__ __device__ __forceinline__
// A loop after it is not unrolled: code that is not in the instruction cache is slower.
#define JAXFP8_ROLLED _Pragma("unroll 1")
#else
#define JAXFP8_HD __attribute__((always_inline)) inline
#define JAXFP8_ROLLED
#endif
