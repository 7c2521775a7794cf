#include "cuda/kernels/sm90_w8a16/kernel.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel S8WeightsKernel(DType wide, TileShape tile) {
  return WeightsKernelFor<DType::kS8>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
