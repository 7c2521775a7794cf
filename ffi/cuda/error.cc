#include <string>

#include "cuda/path.h"

namespace jaxfp8::cuda {

Status CudaError(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return {};
  return "`" + std::string(what) + "` failed: " + cudaGetErrorName(status) + " (" +
         cudaGetErrorString(status) + ")";
}

}  // namespace jaxfp8::cuda
