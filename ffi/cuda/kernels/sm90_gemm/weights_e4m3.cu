#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel E4M3WeightsKernel(DType wide, TileShape tile) {
  return MixedKernelFor<DType::kE4M3>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
