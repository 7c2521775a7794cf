// The scales of lines: those that values have already, and those of their int8 codes.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_

#include "cuda/kernels/sm80_imma/arguments.h"
#include "cuda/kernels/sm80_imma/primitives.cuh"
#include "cuda/kernels/sm80_imma/requantize.cuh"

namespace jaxfp8::cuda::imma {

// The scale that the values of a line have already; 1 if there is none.
JAXFP8_DEVICE float ScaleOfLine(const Operand& o, int64_t batch, int64_t line) {
  if (!o.scale) return 1.0f;
  const int64_t at = o.tiles.At(batch, line, 0);
  if (o.scale_dtype == DType::kF32) return static_cast<const float*>(o.scale)[at];
  const uint16_t bits = static_cast<const uint16_t*>(o.scale)[at];
  return o.scale_dtype == DType::kBF16 ? DecodeBF16(bits) : DecodeF16(bits);
}

// The parameters of a line; any for one that does not exist.
JAXFP8_DEVICE LineParams LoadLine(const Operand& o, int64_t batch, int line, int lines) {
  if (line >= lines) return {1.0f, MakeDivisor(1.0f)};
  return {ScaleOfLine(o, batch, line),
          MakeDivisor(o.line_scale[batch * o.line_scale_batch + line])};
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LINES_CUH_
