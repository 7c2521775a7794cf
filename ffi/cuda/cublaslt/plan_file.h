// A file of the fastest algorithms, to spare later processes the timing.
//
// A line holds the product, the device, the version of cuBLASLt, and the library's own bytes for
// the algorithm. Lines of other versions and devices are ignored. Several processes may append to
// one file.

#pragma once

#include <cublasLt.h>

#include <string>

#include "common/status.h"

namespace jaxfp8::cuda {

// Reads the file, which need not exist, and appends to it from now on; "" ends that.
Status SetPlanFile(const std::string& path);

// Gets the algorithm of a product; returns whether the file has one.
bool RecallAlgorithm(const std::string& product, cublasLtMatmulAlgo_t& algorithm);

// Appends an algorithm, if there is a file. Errors are reported by `SetPlanFile` only.
void KeepAlgorithm(const std::string& product, const cublasLtMatmulAlgo_t& algorithm);

// An algorithm as text, and back; exposed for tests. Reading returns whether `text` is one.
std::string WriteAlgorithm(const cublasLtMatmulAlgo_t& algorithm);
bool ReadAlgorithm(const std::string& text, cublasLtMatmulAlgo_t& algorithm);

}  // namespace jaxfp8::cuda
