// Path "sm80_w8a16": bfloat16 or float16 activations times 8-bit weights, read as they are stored.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_

#include "cuda/path.h"

namespace jaxfp8::cuda {

// For few rows, where the time is that of reading the weights; right for any number. Either side
// may be the 8-bit one. A call is two launches, three on sm_90 with more than 16 rows: pack the
// activations, sum, finish.
extern const Path kSm80W8A16;

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_
