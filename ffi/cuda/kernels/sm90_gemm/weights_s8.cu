#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel S8WeightsKernel(DType wide, TileShape tile) {
  return MixedKernelFor<DType::kS8>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
