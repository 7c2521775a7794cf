// How a matrix is quantised, from its sizes alone.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_

#include <cstdint>

#include "common/quantize.h"

namespace jaxfp8::cuda {

inline constexpr int64_t kQuantizeTile = 128;  // values of a block, either way

inline int64_t RowBytes(const QuantizeProblem& p) { return p.columns * SizeOf(p.in); }

// One scale for all, or for each row.
bool OneForAll(const QuantizeProblem& p);
bool PerRow(const QuantizeProblem& p);

// Whether a row stays in registers from its amax to its codes.
bool RowsInRegisters(const QuantizeProblem& p);

// Whether an amax pass comes first.
bool TwoPasses(const QuantizeProblem& p);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_PLAN_H_
