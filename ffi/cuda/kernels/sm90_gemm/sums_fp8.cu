#include "cuda/kernels/sm90_gemm/instances.cuh"

namespace jaxfp8::cuda::sm90 {

Kernel Float8SumsKernel(DType lhs, DType rhs, TileShape tile) {
  if (lhs == DType::kE5M2) return SumKernelFor<DType::kE5M2, DType::kE4M3>(tile);
  return rhs == DType::kE4M3 ? SumKernelFor<DType::kE4M3, DType::kE4M3>(tile)
                             : SumKernelFor<DType::kE4M3, DType::kE5M2>(tile);
}

}  // namespace jaxfp8::cuda::sm90
