// The cuBLASLt call for a piece: sizes, types, pitches and scale modes. Pure.

#pragma once

#include "cuda/cublaslt/matmul.h"
#include "cuda/cublaslt/pieces.h"

namespace jaxfp8::cuda {

MatmulShape ShapeOf(const Problem& problem, const Layout& layout, const PieceSizes& sizes);

}  // namespace jaxfp8::cuda
