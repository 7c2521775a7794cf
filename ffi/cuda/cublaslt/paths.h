// The cuBLASLt paths:
//
//   cublaslt_fp8    FP8 by FP8 on FP8 tensor cores
//   cublaslt_int8   int8 and uint8 on INT8 tensor cores, accumulated exactly
//   cublaslt_wide   every problem with operands exact in 16 bits. 8-bit sides are decoded piece by
//                   piece and multiplied on 16-bit tensor cores

#pragma once

#include <memory>

#include "common/status.h"
#include "cuda/cublaslt/layout.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// Whether one of them takes the operands' types on some device.
bool LibraryMayTake(const Problem& problem);

// A plan for a product with our epilogue: the first attempt for which the workspace is large enough
// and the library has an algorithm.
Status PlanProduct(const Problem& problem, const Device& device, const ProductTypes& types,
                   size_t workspace, std::unique_ptr<Plan>& plan);

}  // namespace jaxfp8::cuda
