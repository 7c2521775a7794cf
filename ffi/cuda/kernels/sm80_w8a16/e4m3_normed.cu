#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction E4M3NormedKernel(bool mn_major) { return NormedKernelFor<DType::kE4M3>(mn_major); }

}  // namespace jaxfp8::cuda::w8a16
