// A checked call, computed.

#pragma once

#include <string_view>

#include "common/spec.h"
#include "common/status.h"
#include "cpu/kernels/kernel.h"
#include "cpu/pool.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Routes and runs. Fails if the problem has no kernel, or the kernel called `name` cannot take it.
Status Run(const ScaledDotSpec& spec, const Buffers& buffers, std::string_view name, Pool& pool);

// The driver: cuts a problem into output tiles and these into cache-sized blocks. The kernel packs
// and multiplies the blocks. Besides the output and the tables of the problem, it needs a few
// panels of memory per thread.
void RunGemm(const CanonicalDot& problem, const Kernel& kernel, Pool& pool);

}  // namespace jaxfp8
