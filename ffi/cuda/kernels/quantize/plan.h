// Which kernels quantise a matrix, from its sizes alone.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_

#include <cstdint>

#include "common/quantize.h"

namespace jaxfp8::cuda {

inline constexpr int64_t kQuantizeTile = 128;  // rows and columns of a block

inline int64_t RowBytes(const QuantizeProblem& p) { return p.columns * SizeOf(p.in); }

// Whether one scale belongs to the whole tensor, or one to each row.
bool PerTensor(const QuantizeProblem& p);
bool PerRow(const QuantizeProblem& p);

// Whether a row stays in registers from its amax to its codes.
bool RowsInRegisters(const QuantizeProblem& p);

// Whether `FindAmax` runs first.
bool TwoPasses(const QuantizeProblem& p);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_
