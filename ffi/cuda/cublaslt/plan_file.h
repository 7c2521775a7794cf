// Algorithms that were found fastest, kept in a file from process to process.
//
// A line for each: what the product is, on what device, with what version of cuBLASLt, and the
// library's own bytes for the algorithm. Lines of other versions and devices stand beside it
// unread. Several processes may append to one file.

#ifndef JAXFP8_CUDA_CUBLASLT_PLAN_FILE_H_
#define JAXFP8_CUDA_CUBLASLT_PLAN_FILE_H_

#include <cublasLt.h>

#include <string>

namespace jaxfp8::cuda {

// Reads the file, which need not exist yet, and appends to it from now on; "" ends that. Returns
// what is wrong with it, or "".
std::string SetPlanFile(const std::string& path);

// Whether the file has an algorithm for a product.
bool RecallAlgorithm(const std::string& product, cublasLtMatmulAlgo_t& algorithm);

// Keeps one, where there is a file. One that cannot be written to is found out by `SetPlanFile`.
void KeepAlgorithm(const std::string& product, const cublasLtMatmulAlgo_t& algorithm);

// As it stands in a line; exposed for tests. Reading returns whether `text` is one.
std::string WriteAlgorithm(const cublasLtMatmulAlgo_t& algorithm);
bool ReadAlgorithm(const std::string& text, cublasLtMatmulAlgo_t& algorithm);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_PLAN_FILE_H_
