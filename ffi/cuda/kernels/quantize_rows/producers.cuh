// What makes a row that one group of threads holds in registers.

#pragma once

#include "cuda/kernels/quantize_rows/problem.h"
#include "cuda/kernels/quantize_rows/row.cuh"

namespace jaxfp8::cuda {

__device__ __forceinline__ void Prefetch(const void* vector, DType type, int at) {
  const char* from = static_cast<const char*>(vector) + int64_t{at} * (type == DType::kF32 ? 4 : 2);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Asks for gain and shift while the row is on its way: with few rows each is a wait for memory.
template <int kChunks>
__device__ __forceinline__ void PrefetchVectors(const RowsProblem& p, const RowsBuffers& b,
                                                const RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    if (b.gain) Prefetch(b.gain, p.gain, row.At(i));
    if (b.shift) Prefetch(b.shift, p.shift, row.At(i));
  }
}

template <DType kIn, bool kCentred, int kChunks>
__device__ __forceinline__ Moments MomentsOf(const RowsProblem& p, const RowPart<kChunks>& row,
                                             float (&shared)[2][32]) {
  float values[kRowValues], mean = 0.0f, squares = 0.0f;
  const float count = static_cast<float>(p.columns);
  if constexpr (kCentred) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      DecodeChunk<kIn>(row.words[i], values);
#pragma unroll
      for (float value : values) sum += value;
    }
    mean = SumOfGroup(sum, row.group, shared[0]) / count;
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    DecodeChunk<kIn>(row.words[i], values);
    if (row.At(i) >= row.columns) break;
#pragma unroll
    for (float value : values) {
      const float centred = kCentred ? value - mean : value;
      squares = fmaf(centred, centred, squares);
    }
  }
  return {mean, rsqrtf(SumOfGroup(squares, row.group, shared[1]) / count + p.epsilon)};
}

template <DType kIn, bool kCentred, int kChunks>
__device__ __forceinline__ void Normalize(const RowsProblem& p, const RowsBuffers& b,
                                          Moments moments, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    NormalizeChunk<kIn, kCentred>(p, b, moments, row.At(i), row.words[i]);
  }
}

// activation(x) * factor. Chunks that do not exist stay zeros.
template <DType kIn, int kChunks>
__device__ __forceinline__ void ApplyElementwise(const RowsProblem& p, const RowsBuffers& b,
                                                 RowPart<kChunks>& row) {
  if (p.activation == Activation::kNone && !p.has_factor) return;
  RowPart<kChunks> factor = row;
  if (p.has_factor) LoadRow(b.factor, factor);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) ActivateChunk<kIn>(p, factor.words[i], row.words[i]);
}

}  // namespace jaxfp8::cuda
