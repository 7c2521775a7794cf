// The W8A16 kernel on Hopper, for path `sm90_gemm`: bfloat16 or float16, as lines of K, times 8-bit
// weights in either order, with scales and zero points constant along K. Beside bfloat16 they may
// change every 64 of K, or a multiple, and scales every 32.

#pragma once

#include <cstddef>
#include <memory>

#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda::sm90 {

// Why the kernel cannot compute a problem of which `IsMixed` holds.
Status WhyNotMixed(const Problem& problem);

// One launch (kernel.cuh).
Status MakeMixedPlan(const Problem& problem, const Device& device, size_t workspace,
                     std::unique_ptr<Plan>& plan);

// Whether codes of weights are multiplied by their scales as they are decoded: scales of 32 of K,
// or of 64 that are powers of two.
bool HasFineScales(const Side& weights);

}  // namespace jaxfp8::cuda::sm90
