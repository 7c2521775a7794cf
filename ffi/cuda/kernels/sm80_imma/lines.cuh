// The steps of lines.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_

#include "cuda/kernels/sm80_imma/arguments.h"
#include "cuda/kernels/sm80_imma/primitives.cuh"
#include "cuda/kernels/sm80_imma/requantize.cuh"

namespace jaxfp8::cuda::imma {

// The step of a line, to divide by; any for a line that does not exist.
JAXFP8_DEVICE Divisor LoadLine(const Operand& o, int64_t batch, int line, int lines) {
  return MakeDivisor(line < lines ? o.step[batch * o.step_batch + line] : 1.0f);
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_
