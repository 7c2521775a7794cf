#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction S8Kernel(DType activation, bool mn_major, int row_fragments, bool joint) {
  return DenseKernelFor<DType::kS8>(activation, mn_major, row_fragments, joint);
}

}  // namespace jaxfp8::cuda::w8a16
