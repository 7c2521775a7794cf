#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel E5M2WeightsKernel(DType wide, TileShape tile) {
  return MixedKernelFor<DType::kE5M2>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
