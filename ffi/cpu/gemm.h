// The driver: cuts a problem into output tiles, tiles into blocks that fit the caches, and lets a
// kernel pack and multiply them.

#ifndef JAXFP8_CPU_GEMM_H_
#define JAXFP8_CPU_GEMM_H_

#include "cpu/kernels/kernel.h"
#include "cpu/pool.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Computes the problem with the kernel. Memory beyond the output is a few panels per thread,
// beside the tables of the problem.
void RunGemm(const Problem& problem, const Kernel& kernel, Pool& pool);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_GEMM_H_
