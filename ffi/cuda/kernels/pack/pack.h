// From a side of the product as it lies in memory to the dense matrix that a library product wants.
//
// Every request covers the free indices [first, first + count) of `batches` consecutive batch
// indices. Nothing here allocates; sources are the side's own arrays, destinations are workspace.

#ifndef JAXFP8_CUDA_KERNELS_PACK_PACK_H_
#define JAXFP8_CUDA_KERNELS_PACK_PACK_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

// Which lines of a side.
struct Lines {
  int64_t batch = 0, batches = 1;
  int64_t first = 0, count = 0;
  int64_t depth = 0;
};

// Writes line f to row f - first of a K-major matrix, [batches][count_padded][depth_padded], and
// zeros (the bits, whatever the type) to what is padding.
//
// `out` is the side's own 8-bit dtype, or int8 for uint8 (each value less 128), or bfloat16,
// float16 or float32: then the values are decoded, less the zero point if `subtract_zero_point`,
// and times the scale if `apply_scale`; rounded once, to nearest even.
struct PackRequest {
  Side side;
  Lines lines;
  DType out = DType::kNone;
  bool subtract_zero_point = false;
  bool apply_scale = false;
  int64_t count_padded = 0;  // rows of the matrix, >= count
  int64_t depth_padded = 0;  // its row pitch in elements, >= depth; times the size a multiple of 16
};

// `values`, `scale`, `zero_point`: the side's arrays, from their beginning; `scale` and
// `zero_point` may be null where the request does not use them. `matrix` is 16-byte aligned.
std::string LaunchPack(const PackRequest& request, const void* values, const float* scale,
                       const int32_t* zero_point, void* matrix, cudaStream_t stream);

// sums[b * count + f] = the sum over the depth of line `first + f` of batch index b, of int8 or
// uint8 values; with `as_signed`, each uint8 value less 128, as `LaunchPack` writes it. Exact while
// it fits int32.
std::string LaunchLineSums(const Side& side, const Lines& lines, bool as_signed, const void* values,
                           int32_t* sums, cudaStream_t stream);

// Where the scale of tile (i, j) goes: b * batch_stride + i * free_stride + j * depth_stride, for
// i < free_count, j < depth_count. It is read at free index first + i * free_step and depth index
// j * depth_step. Rows i from free_count to free_padded get 0.
struct ScaleRequest {
  Tiles tiles;
  int64_t batch = 0, batches = 1;
  int64_t first = 0, free_count = 1, free_step = 1, free_padded = 0;
  int64_t depth_count = 1, depth_step = 1;
  int64_t batch_stride = 0, free_stride = 1, depth_stride = 0;
};

// For a scalar as a vector of M: free_count = M. For 1x128 scales of [M, K/128] as
// [K/128][M padded to 4]: free_count = M, free_padded = padded, depth_count = K/128,
// depth_step = 128, depth_stride = padded.
std::string LaunchScales(const ScaleRequest& request, const float* scale, float* to,
                         cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_PACK_PACK_H_
