#include "cuda/kernels/sm80_imma/kernel.cuh"

namespace jaxfp8::cuda::imma {

KernelFunction E5M2Kernel(DType activation, bool mn_major, int row_fragments) {
  return KernelFor<DType::kE5M2>(activation, mn_major, row_fragments);
}

}  // namespace jaxfp8::cuda::imma
