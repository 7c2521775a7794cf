// The path `sm90_gemm` on Hopper: FP8 times FP8, with scales constant over 128 of K, or more; int8
// or uint8 on both sides, with scales and zero points constant along K; and 8-bit weights beside
// 16-bit values (sm90_w8a16/path.h). One launch (kernel.cuh), after copies of the operands that are
// not lines of K, or whose lines are no multiple of 16 bytes, and sums of the lines for zero points
// (kernels/pack).

#pragma once

#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda::sm90 {

Status WhyNot(const Problem& problem, const Device& device);

// Why the Hopper kernels cannot count what a problem has.
Status WhyNotSizes(const Problem& problem);

// Whether the sums of 8-bit operands are scaled once, after all of K: those of integers, and those
// of FP8 that need not be exact in float32 ("fast" sums: tensor cores keep 13 bits of each term).
bool SumsFirst(const Problem& problem);

}  // namespace jaxfp8::cuda::sm90
