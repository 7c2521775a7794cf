#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction S8Kernel(DType wide, bool depth_major, int eights) {
  return KernelFor<DType::kS8>(wide, depth_major, eights);
}

}  // namespace jaxfp8::cuda::w8a16
