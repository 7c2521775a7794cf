// From wide floats to 8 bits with a chosen or given scale per tile, as `jaxfp8.quantize` has it.
//
//   scale = max|x| * float32(1 / highest), clipped to normal numbers; 1 for a tile of zeros
//   code  = saturate(round(x / scale))
//
// bit for bit what jaxfp8/_quantize.py computes: NaN and infinities do not count in the maximum,
// the division is correctly rounded, NaN stays NaN in FP8 (its sign may be lost) and becomes 0 in
// int8, infinities saturate.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype.h"

namespace jaxfp8::cuda {

// x is [rows, columns], row-major and dense; a batch is folded into the rows.
//
// Tiles that share a scale: (rows, columns) one for all, (1, columns) one per row,
// (1, 128) or (128, 128). Scales and amaxes are [ceil(rows / tile_rows),
// ceil(columns / tile_columns)], float32, row-major.
struct QuantizeProblem {
  int64_t rows = 0, columns = 0;
  int64_t tile_rows = 1, tile_columns = 1;
  DType in = DType::kNone;   // bfloat16, float16, float32
  DType out = DType::kNone;  // float8_e4m3fn, float8_e5m2, int8
  bool given_scale = false;  // the scale is an input; 0 counts as 1
  bool transposed = false;   // the same codes also as [columns, rows]
  bool amax = false;  // the largest finite |x| of each tile is a result; with given_scale, of all
};

struct QuantizeBuffers {
  const void* x = nullptr;
  float* scale = nullptr;  // read where it is given, else written
  void* codes = nullptr;
  void* codes_transposed = nullptr;
  float* amax = nullptr;
  void* workspace = nullptr;  // 16-byte aligned, `QuantizeWorkspace` bytes
};

// Why the kernels cannot do it, "" if they can.
std::string QuantizeWhyNot(const QuantizeProblem& problem);

size_t QuantizeWorkspace(const QuantizeProblem& problem);

std::string LaunchQuantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_H_
