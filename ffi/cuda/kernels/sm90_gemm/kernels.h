// The instances of the kernel of `sm90_gemm`.

#pragma once

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90_gemm/layout.h"

namespace jaxfp8::cuda::sm90 {

// The kernel for a tile shape, or one without a function.
Kernel E4M3Kernel(DType rhs, Scaling scaling, TileShape tile);
Kernel E5M2Kernel(DType rhs, Scaling scaling, TileShape tile);
Kernel Float8SumsKernel(DType lhs, DType rhs, TileShape tile);  // scaled after all of K
Kernel S8Kernel(DType rhs, TileShape tile);
Kernel U8Kernel(DType rhs, TileShape tile);

}  // namespace jaxfp8::cuda::sm90
