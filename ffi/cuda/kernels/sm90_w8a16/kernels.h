// The instances of the W8A16 kernel.

#pragma once

#include "cuda/kernels/sm90/arguments.h"

namespace jaxfp8::cuda::sm90 {

// The kernel for weights of a type, `wide` values of 16 bits and a tile shape; or one without a
// function.
Kernel E4M3WeightsKernel(DType wide, TileShape tile);
Kernel E5M2WeightsKernel(DType wide, TileShape tile);
Kernel S8WeightsKernel(DType wide, TileShape tile);

}  // namespace jaxfp8::cuda::sm90
