// 1 / x on the device: cuBLASLt multiplies by a scale, our definition divides.

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_

#include <cuda_runtime_api.h>

#include "common/status.h"

namespace jaxfp8::cuda {

// *to = 1 / *from, rounded once. If that overflows and *from is not 0, it is the largest float, so
// that 0 times it stays 0.
Status LaunchReciprocal(const float* from, float* to, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_RECIPROCAL_H_
