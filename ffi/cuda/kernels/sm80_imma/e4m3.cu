#include "cuda/kernels/sm80_imma/kernel.cuh"

namespace jaxfp8::cuda::imma {

KernelFunction E4M3Kernel(bool mn_major, int row_tiles) {
  return KernelFor<DType::kE4M3>(mn_major, row_tiles);
}

}  // namespace jaxfp8::cuda::imma
