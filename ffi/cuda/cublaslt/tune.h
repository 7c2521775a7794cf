// Times several algorithms for one product and picks the fastest.

#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "common/status.h"
#include "cuda/cublaslt/matmul.h"

namespace jaxfp8::cuda {

// Runs the product once with an algorithm.
using RunAlgorithm =
    std::function<Status(const cublasLtMatmulAlgo_t&, const MatmulBuffers&, cudaStream_t)>;

// Whether a product takes long enough for timing to tell algorithms apart.
bool WorthTiming(const MatmulShape& shape);

// The index of the fastest algorithm, -1 if there is no memory for timing. It uses buffers of its
// own: the program still needs the data in its buffers, and data affects the time.
int Fastest(const MatmulShape& shape, size_t workspace_bytes,
            const std::vector<cublasLtMatmulAlgo_t>& algorithms, const RunAlgorithm& run);

}  // namespace jaxfp8::cuda
