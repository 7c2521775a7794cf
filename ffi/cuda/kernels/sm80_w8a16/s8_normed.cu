#include "cuda/kernels/sm80_w8a16/mainloop.cuh"

namespace jaxfp8::cuda::w8a16 {

KernelFunction S8NormedKernel(bool mn_major) { return NormedKernelFor<DType::kS8>(mn_major); }

}  // namespace jaxfp8::cuda::w8a16
