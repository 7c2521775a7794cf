// One word for functions that the CPU kernels, the CUDA kernels and the host tests share.
//
// Kernel files are compiled once per instruction set. A shared inline function that the compiler
// left out of line would be merged by the linker, and a machine without AVX-512 could be handed the
// copy that needs it. So every shared function is always inlined.

#ifndef JAXFP8_COMMON_PLATFORM_H_
#define JAXFP8_COMMON_PLATFORM_H_

#ifdef __CUDACC__
#define JAXFP8_HD __host__ __device__ __forceinline__
#else
#define JAXFP8_HD __attribute__((always_inline)) inline
#endif

#endif  // JAXFP8_COMMON_PLATFORM_H_
