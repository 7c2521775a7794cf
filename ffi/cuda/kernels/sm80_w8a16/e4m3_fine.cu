#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction E4M3FineKernel(DType activation, bool mn_major, int row_fragments) {
  return KernelFor<DType::kE4M3, Launch::kFine>(activation, mn_major, row_fragments);
}

}  // namespace jaxfp8::cuda::w8a16
