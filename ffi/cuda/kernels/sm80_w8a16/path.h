// Path "sm80_w8a16": bfloat16 or float16 activations times 8-bit weights, read as they are stored.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_

#include "cuda/path.h"

namespace jaxfp8::cuda {

// For skinny products, where reading the weights takes the time; correct for any number of rows.
// Either side may be the 8-bit one. A call has two launches, three on sm_90 with more than 16 rows:
//   PackActivations   activations to packed tiles         pack_activations.cuh
//   Sm80W8A16         partial tiles of float32            mainloop.cuh
//   ReducePartials    split-K reduction and epilogue      split_k.cuh
extern const Path kSm80W8A16;

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_PATH_H_
