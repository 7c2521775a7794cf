// The fastest of several algorithms for one product, by timing each.

#ifndef JAXFP8_CUDA_CUBLASLT_TUNE_H_
#define JAXFP8_CUDA_CUBLASLT_TUNE_H_

#include <cublasLt.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cuda/cublaslt/matmul.h"

namespace jaxfp8::cuda {

// Runs the product once with an algorithm, on buffers and a stream that are given.
using RunAlgorithm =
    std::function<std::string(const cublasLtMatmulAlgo_t&, const MatmulBuffers&, cudaStream_t)>;

// Whether timing can tell algorithms apart for such a product.
bool WorthTiming(const MatmulShape& shape);

// The index of the fastest, -1 where there is no memory to find out. The buffers are its own:
// those of the program hold what is still needed, and timing must not depend on what they hold.
int Fastest(const MatmulShape& shape, size_t workspace_bytes,
            const std::vector<cublasLtMatmulAlgo_t>& algorithms, const RunAlgorithm& run);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_TUNE_H_
