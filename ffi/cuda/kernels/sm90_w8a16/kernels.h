// The instances of the W8A16 kernel: CMakeLists.txt lists them.

#pragma once

#include "cuda/kernels/sm90/arguments.h"

namespace jaxfp8::cuda::sm90 {

// The kernel for weights of a type and a tile shape, or one without a function.
//   wide  of the values: bfloat16 or float16
template <DType kWeight>
Kernel WeightsKernelFor(DType wide, TileShape tile);

}  // namespace jaxfp8::cuda::sm90
