#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction S8FineKernel(DType activation, bool mn_major, int row_fragments) {
  return KernelFor<DType::kS8, Launch::kFine>(activation, mn_major, row_fragments);
}

}  // namespace jaxfp8::cuda::w8a16
