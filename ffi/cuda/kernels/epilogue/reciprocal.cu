#include <cfloat>

#include "cuda/kernels/epilogue/reciprocal.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

__global__ void Reciprocal(const float* from, float* to) {
  const float x = *from, inverse = __frcp_rn(x);
  *to = isinf(inverse) && x != 0 ? copysignf(FLT_MAX, x) : inverse;
}

}  // namespace

Status LaunchReciprocal(const float* from, float* to, cudaStream_t stream) {
  Reciprocal<<<1, 1, 0, stream>>>(from, to);
  return CudaError(cudaGetLastError(), "launching `Reciprocal`");
}

}  // namespace jaxfp8::cuda
