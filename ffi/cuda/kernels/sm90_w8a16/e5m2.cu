#include "cuda/kernels/sm90_w8a16/kernel.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel E5M2WeightsKernel(DType wide, TileShape tile) {
  return WeightsKernelFor<DType::kE5M2>(wide, tile);
}

}  // namespace jaxfp8::cuda::sm90
