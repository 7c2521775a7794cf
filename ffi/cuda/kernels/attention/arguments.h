// The arguments of the kernel.

#pragma once

#include "cuda/kernels/attention/problem.h"
#include "cuda/kernels/attention/schedule.h"

namespace jaxfp8::cuda::attention {

struct Arguments {
  AttentionProblem p;
  AttentionBuffers b;
  int32_t tiles, parts;
  bool cluster;
};

}  // namespace jaxfp8::cuda::attention
