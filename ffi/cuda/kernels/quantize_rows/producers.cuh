// What makes a row, in the registers that hold it: a norm, or an activation and a factor.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PRODUCERS_CUH_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PRODUCERS_CUH_

#include "common/activation_f32.h"
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

// Mean, if wanted, and the reciprocal of the root mean square of what is left.
struct Moments {
  float mean, scale;
};

template <DType kIn, int kChunks>
__device__ __forceinline__ Moments MomentsOf(const RowsProblem& p, const RowPart<kChunks>& row,
                                             float* shared) {
  float values[kRowValues], mean = 0.0f, squares = 0.0f;
  const float count = static_cast<float>(p.columns);
  if (p.centred) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      DecodeChunk<kIn>(row.words[i], values);
#pragma unroll
      for (float value : values) sum += value;
    }
    mean = SumOfGroup(sum, row.group, shared) / count;
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    DecodeChunk<kIn>(row.words[i], values);
    if (row.At(i) >= row.columns) break;
#pragma unroll
    for (float value : values) squares = fmaf(value - mean, value - mean, squares);
  }
  return {mean, rsqrtf(SumOfGroup(squares, row.group, shared) / count + p.epsilon)};
}

template <DType kIn, int kChunks>
__device__ __forceinline__ void Normalize(const RowsProblem& p, const RowsBuffers& b,
                                          Moments moments, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    float values[kRowValues], vector[kRowValues];
    DecodeChunk<kIn>(row.words[i], values);
#pragma unroll
    for (float& value : values) value = (value - moments.mean) * moments.scale;
    if (p.rounded_first) RoundChunk<kIn>(values);
    if (b.gain) {
      LoadVector<kIn>(b.gain, p.gain, row.At(i), vector);
#pragma unroll
      for (int j = 0; j < kRowValues; ++j) values[j] *= vector[j];
    }
    if (p.rounded_second) RoundChunk<kIn>(values);
    if (b.shift) {
      LoadVector<kIn>(b.shift, p.shift, row.At(i), vector);
#pragma unroll
      for (int j = 0; j < kRowValues; ++j) values[j] += vector[j];
    }
    EncodeChunk<kIn>(values, row.words[i]);
  }
}

template <DType kIn, float (*kActivation)(float)>
__device__ __forceinline__ void ApplyToChunk(float (&values)[kRowValues]) {
#pragma unroll
  for (float& value : values) value = kActivation(value);
  RoundChunk<kIn>(values);
}

template <DType kIn>
__device__ __forceinline__ void ApplyActivation(Activation activation,
                                                float (&values)[kRowValues]) {
  if (activation == Activation::kRelu) ApplyToChunk<kIn, ReluF32>(values);
  if (activation == Activation::kGeluTanh) ApplyToChunk<kIn, GeluTanhF32>(values);
  if (activation == Activation::kGeluErf) ApplyToChunk<kIn, GeluErfF32>(values);
  if (activation == Activation::kSilu) ApplyToChunk<kIn, SiluF32>(values);
}

// activation(x) * factor. Chunks that do not exist stay zeros.
template <DType kIn, int kChunks>
__device__ __forceinline__ void ApplyElementwise(const RowsProblem& p, const RowsBuffers& b,
                                                 RowPart<kChunks>& row) {
  if (p.activation == Activation::kNone && !p.has_factor) return;
  RowPart<kChunks> factor = row;
  if (p.has_factor) LoadRow(b.factor, factor);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float values[kRowValues], factors[kRowValues];
    DecodeChunk<kIn>(row.words[i], values);
    ApplyActivation<kIn>(p.activation, values);
    if (p.has_factor) {
      DecodeChunk<kIn>(factor.words[i], factors);
#pragma unroll
      for (int j = 0; j < kRowValues; ++j) values[j] *= factors[j];
    }
    EncodeChunk<kIn>(values, row.words[i]);
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_PRODUCERS_CUH_
