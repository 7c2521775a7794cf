#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel U8Kernel(DType rhs, TileShape tile) {
  return rhs == DType::kS8 ? SumKernelFor<DType::kU8, DType::kS8>(tile)
                           : SumKernelFor<DType::kU8, DType::kU8>(tile);
}

}  // namespace jaxfp8::cuda::sm90
