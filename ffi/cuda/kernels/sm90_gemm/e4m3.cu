#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel E4M3Kernel(DType rhs, Scaling scaling, TileShape tile) {
  return rhs == DType::kE4M3 ? KernelFor<DType::kE4M3, DType::kE4M3>(scaling, tile)
                             : KernelFor<DType::kE4M3, DType::kE5M2>(scaling, tile);
}

}  // namespace jaxfp8::cuda::sm90
