// Path "sm80_w8a16": bfloat16 or float16 activations times 8-bit weights, read as they are stored.

#pragma once

#include "cuda/path.h"

namespace jaxfp8::cuda {

// For skinny M, bound by reading the weights; correct for any number of rows. Either side may be
// the 8-bit one. A call has one launch; before sm_90 a split K adds a second:
//   Sm80W8A16         product, split-K reduction in a cluster, and epilogue (mainloop.cuh)
//   ReducePartials    reduction and epilogue on devices without clusters (split_k.cuh)
// Several products of one input may share the launch (plan.h).
extern const Path kSm80W8A16;

}  // namespace jaxfp8::cuda
