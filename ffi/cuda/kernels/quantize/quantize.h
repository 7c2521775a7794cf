// Quantizes wide floats to 8 bits with a computed or given scale per tile.
//
//   scale = max|x| * float32(1 / highest), clipped to normal numbers, or rounded up to a power of
//           two; 1 for a tile of zeros
//   code  = saturate(round(x / scale))
//
// The bits are those of jaxfp8/_ops/quantize.py. The maximum ignores NaN and infinities, and the
// division is correctly rounded. NaN stays NaN in FP8, though it may lose its sign, and becomes 0
// in int8. Infinities saturate.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/quantize.h"
#include "common/status.h"

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

// Why the kernels cannot compute a problem. A scale belongs to a tile of
// (rows, columns): the tensor, (1, columns): a row, (1, 128) or (128, 128). A transposed output has
// scales of its own beside (1, 128) alone.
Status QuantizeWhyNot(const QuantizeProblem& problem);

// Bytes of workspace, which is 16-byte aligned.
size_t QuantizeWorkspace(const QuantizeProblem& problem);

Status LaunchQuantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                      cudaStream_t stream);

}  // namespace jaxfp8::cuda
