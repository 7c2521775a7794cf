// The path `sm90_gemm` on Hopper: FP8 times FP8, with scales constant over 128 of K, or more; int8
// or uint8 on both sides, with scales and zero points constant along K; and bfloat16 or float16,
// as lines of K, times 8-bit weights in either order, with scales and zero points constant along
// it. Beside bfloat16 they may change every 64 of K, or a multiple.

#pragma once

#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// One launch (kernel.cuh; for 16-bit values sm90_w8a16/kernel.cuh), after copies of the operands
// that are not lines of K, or whose lines are no multiple of 16 bytes, and sums of the lines for
// zero points (kernels/pack).
extern const Path kSm90Gemm;

namespace sm90 {

Status WhyNot(const Problem& problem, const Device& device);

// Why the kernel cannot count what a problem has.
Status WhyNotSizes(const Problem& problem);

}  // namespace sm90
}  // namespace jaxfp8::cuda
