#include "cuda/kernels/sm90_w8a16/kernel.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel E4M3WeightsKernel(DType wide, TileShape tile) {
  return WeightsKernelFor<DType::kE4M3>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
