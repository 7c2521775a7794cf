#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction E5M2NormedKernel(bool mn_major) { return NormedKernelFor<DType::kE5M2>(mn_major); }

}  // namespace jaxfp8::cuda::w8a16
