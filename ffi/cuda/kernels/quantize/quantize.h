// From wide floats to 8 bits with a chosen or given scale per tile, as `jaxfp8.quantize` has it.
//
//   scale = max|x| * float32(1 / highest), clipped to normal numbers; 1 for a tile of zeros
//   code  = saturate(round(x / scale))
//
// bit for bit what jaxfp8/_ops/quantize.py computes: NaN and infinities do not count in the
// maximum, the division is correctly rounded, NaN stays NaN in FP8 (its sign may be lost) and
// becomes 0 in int8, infinities saturate.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_QUANTIZE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "common/quantize.h"

namespace jaxfp8::cuda {

// Tiles that share a scale: (rows, columns) one for all, (1, columns) one per row, (1, 128) or
// (128, 128). The workspace is 16-byte aligned and has `QuantizeWorkspace` bytes.

// Why the kernels cannot do it, "" if they can.
std::string QuantizeWhyNot(const QuantizeProblem& problem);

size_t QuantizeWorkspace(const QuantizeProblem& problem);

std::string LaunchQuantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_QUANTIZE_H_
