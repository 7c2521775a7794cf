#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction E4M3Kernel(DType wide, bool depth_major, int eights) {
  return KernelFor<DType::kE4M3>(wide, depth_major, eights);
}

}  // namespace jaxfp8::cuda::w8a16
