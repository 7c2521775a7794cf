// A plan for a cuBLASLt product with our epilogue.

#pragma once

#include <memory>

#include "common/status.h"
#include "cuda/cublaslt/layout.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// Plans the first attempt for which the workspace is large enough and the library has an algorithm.
Status PlanProduct(const Problem& problem, const Device& device, const ProductTypes& types,
                   size_t workspace, std::unique_ptr<Plan>& plan);

}  // namespace jaxfp8::cuda
