// Path "sm80_imma": FP8 weights times 8-bit or 16-bit activations, computed in int8.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_PATH_H_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_PATH_H_

#include "cuda/path.h"

namespace jaxfp8::cuda {

// It rounds operands a second time, as `compute="int8"` does, so it computes another number than
// other paths do: no problem is routed to it, only a call that names it. A call has these
// launches, with those after the first for each piece of the output:
//   FindScales   the step of each line of a side that is not int8 yet,    line_scales.cuh
//                and the scale of its codes
//   Sm80Imma     exact sums in int32                                      mainloop.cuh
//   the epilogue of kernels/epilogue
extern const Path kSm80Imma;

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_PATH_H_
