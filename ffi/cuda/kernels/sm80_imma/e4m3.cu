#include "cuda/kernels/sm80_imma/kernel.cuh"

namespace jaxfp8::cuda::imma {

KernelFunction E4M3Kernel(DType activation, bool mn_major, int row_fragments) {
  return KernelFor<DType::kE4M3>(activation, mn_major, row_fragments);
}

}  // namespace jaxfp8::cuda::imma
