// From wide floats to 8 bits, as in `jaxfp8.quantize`.
//
//   scale = max|x| * float32(1 / highest), clipped to normal numbers, or rounded up to a power of
//           two; 1 for a tile of zeros
//   code  = saturate(round(x / scale))
//
// NaN and infinities do not count in the maximum, the division is correctly rounded, NaN stays NaN
// in FP8 and becomes 0 in int8, infinities saturate.

#pragma once

#include <string_view>

#include "common/quantize.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace jaxfp8 {

// Why a problem of any tiles cannot be computed, or the instruction set called `name` not be used.
// No name lets the library choose.
Status QuantizeWhyNot(const QuantizeProblem& problem, std::string_view name);

// Computes a problem accepted by `QuantizeWhyNot`.
void Quantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers, std::string_view name,
              Pool& pool);

// The largest magnitude of each row of x, row-major and dense; NaN if the row has one.
void FindRowAmax(const void* x, DType type, int64_t rows, int64_t columns, float* amax, Pool& pool);

}  // namespace jaxfp8
