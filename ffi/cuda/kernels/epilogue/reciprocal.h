// 1 / x on the device, for a library that multiplies where the definition divides.

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_

#include <cuda_runtime_api.h>

#include <string>

namespace jaxfp8::cuda {

// *to = 1 / *from, rounded once. Where that overflows though *from is not 0, it is the largest
// float: 0 times it must stay 0.
std::string LaunchReciprocal(const float* from, float* to, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_
