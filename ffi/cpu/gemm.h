// The driver: cuts a problem into output tiles and these into cache-sized blocks. A kernel packs
// and multiplies the blocks.

#ifndef JAXFP8_CPU_GEMM_H_
#define JAXFP8_CPU_GEMM_H_

#include "cpu/kernels/kernel.h"
#include "cpu/pool.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Computes the problem with the kernel. Besides the output and the tables of the problem, it needs
// a few panels of memory per thread.
void RunGemm(const Problem& problem, const Kernel& kernel, Pool& pool);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_GEMM_H_
