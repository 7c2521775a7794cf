// Packs a side of the product: from its stored layout to the dense, K-contiguous matrix for
// cuBLASLt.
//
// A line is a row of lhs or a column of rhs: the values of one free index. Every request covers the
// lines [first, first + count) of `batches` consecutive batch indices. Sources are the side's own
// arrays, destinations are workspace; nothing is allocated.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// A range of lines of a side.
struct LineRange {
  int64_t batch = 0, batches = 1;
  int64_t first = 0, count = 0;
  int64_t depth = 0;
};

// Writes line f to row f - first of a K-contiguous matrix [batches][count_padded][depth_padded].
// The padding is filled with zero bits.
//
// `out` is one of
//   the side's own 8-bit dtype           codes are copied
//   int8 for a uint8 side                each code minus 128
//   bfloat16 or float16                  8-bit codes are decoded, which is exact; values of the
//                                        same dtype are copied
struct PackRequest {
  Side side;
  LineRange lines;
  DType out = DType::kNone;
  // Exponents by which codes are multiplied as they are decoded to bfloat16, one for each of the
  // side's tiles, or null. Exact but for products below 2^-126, which are rounded.
  const void* exponents = nullptr;
  int64_t count_padded = 0;  // rows of the matrix, >= count
  int64_t depth_padded = 0;  // row pitch in elements, >= depth; in bytes a multiple of 16
};

//   values  the side's array from its beginning
//   matrix  16-byte aligned
Status LaunchPack(const PackRequest& request, const void* values, void* matrix,
                  cudaStream_t stream);

// sums[b * count + f] = the sum along K of line `first + f` of batch index b, of int8 or uint8
// values. Exact as long as it fits int32.
//   as_signed  each uint8 value counts minus 128, as `LaunchPack` writes it
Status LaunchLineSums(const Side& side, const LineRange& lines, bool as_signed, const void* values,
                      int32_t* sums, cudaStream_t stream);

// Copies scales into cuBLASLt's order. For i < free_count and j < depth_count, the
// scale at free index first + i * free_step and depth index j * depth_step goes to b * batch_stride
// + i * free_stride + j * depth_stride. Rows free_count to free_padded get 0.
struct ScaleRequest {
  Tiles tiles;
  int64_t batch = 0, batches = 1;
  int64_t first = 0, free_count = 1, free_step = 1, free_padded = 0;
  int64_t depth_count = 1, depth_step = 1;
  int64_t batch_stride = 0, free_stride = 1, depth_stride = 0;
};

// Examples: a scalar as a vector of M has free_count = M. Scales of 1 x 128 tiles, from [M, K/128]
// to [K/128][M padded to 4], have free_count = M, free_padded = depth_stride = M padded,
// depth_count = K/128 and depth_step = 128.
Status LaunchScales(const ScaleRequest& request, const float* scale, float* to,
                    cudaStream_t stream);

}  // namespace jaxfp8::cuda
