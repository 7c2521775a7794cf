// The cuBLASLt call for a piece: sizes, types, pitches and scale modes. Pure.

#ifndef JAXFP8_CUDA_CUBLASLT_MATMUL_SHAPE_H_
#define JAXFP8_CUDA_CUBLASLT_MATMUL_SHAPE_H_

#include "cuda/cublaslt/matmul.h"
#include "cuda/cublaslt/pieces.h"

namespace jaxfp8::cuda {

MatmulShape ShapeOf(const Problem& problem, const Layout& layout, const PieceSizes& sizes);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_MATMUL_SHAPE_H_
