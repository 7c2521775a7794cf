// The instances of the kernel of `sm90_gemm`: CMakeLists.txt lists them.

#pragma once

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90_gemm/layout.h"

namespace jaxfp8::cuda::sm90 {

// The kernel for a pair of types and a tile shape, or one without a function: of FP8 with scales
// that change along K, and of what is scaled after all of K.
template <DType kLhs, DType kRhs>
Kernel KernelFor(Scaling scaling, TileShape tile);
template <DType kLhs, DType kRhs>
Kernel SumKernelFor(TileShape tile);

}  // namespace jaxfp8::cuda::sm90
