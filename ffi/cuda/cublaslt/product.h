// A plan that multiplies with cuBLASLt and finishes with our epilogue.

#ifndef JAXFP8_CUDA_CUBLASLT_PRODUCT_H_
#define JAXFP8_CUDA_CUBLASLT_PRODUCT_H_

#include <memory>
#include <string>

#include "cuda/cublaslt/layout.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// Takes the first attempt for which there is room and an algorithm; null with `wrong` set where
// there is none.
std::unique_ptr<Plan> PlanProduct(const Problem& problem, const Device& device,
                                  const ProductTypes& types, size_t workspace, std::string& wrong);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_PRODUCT_H_
