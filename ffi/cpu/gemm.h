// The driver: cuts a problem into output tiles and these into cache-sized blocks. A kernel packs
// and multiplies the blocks.

#pragma once

#include "cpu/kernels/kernel.h"
#include "cpu/pool.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Computes the problem with the kernel. Besides the output and the tables of the problem, it needs
// a few panels of memory per thread.
void RunGemm(const CanonicalDot& problem, const Kernel& kernel, Pool& pool);

}  // namespace jaxfp8
