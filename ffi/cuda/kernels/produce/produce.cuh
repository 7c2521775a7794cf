// Makes a chunk of a row, 16 bytes of 16-bit floats, in the registers that hold it.

#pragma once

#include "common/activation_f32.h"
#include "cuda/kernels/produce/problem.h"
#include "cuda/kernels/quantize/chunk.cuh"

namespace jaxfp8::cuda {

inline constexpr int kRowValues = 8;  // of a chunk

// Streams past the L1 cache, which the gain keeps.
__device__ __forceinline__ void LoadOnce(const void* x, int64_t at, uint32_t (&to)[kWords]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(static_cast<const uint16_t*>(x) + at));
}

template <DType kIn>
__device__ __forceinline__ void DecodeChunk(const uint32_t (&words)[kWords],
                                            float (&values)[kRowValues]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) DecodeWord<kIn>(words[i], values + 2 * i);
}

template <DType kIn>
__device__ __forceinline__ void EncodeChunk(const float (&values)[kRowValues],
                                            uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = EncodeWord<kIn>(values + 2 * i);
}

// Rounds to the type of x.
template <DType kIn>
__device__ __forceinline__ void RoundChunk(float (&values)[kRowValues]) {
  uint32_t words[kWords];
  EncodeChunk<kIn>(values, words);
  DecodeChunk<kIn>(words, values);
}

// Eight entries of a vector of `type`, the type of x or float32.
template <DType kIn>
__device__ __forceinline__ void LoadVector(const void* from, DType type, int64_t at,
                                           float (&values)[kRowValues]) {
  if (type == DType::kF32) {
    const float4* wide = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 low = __ldg(wide), high = __ldg(wide + 1);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const uint4 part =
        __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at));
    const uint32_t words[kWords] = {part.x, part.y, part.z, part.w};
    DecodeChunk<kIn>(words, values);
  }
}

// Of a row: the mean, if wanted, and the reciprocal of the root mean square of what is left.
struct Moments {
  float mean, scale;
};

// The products of two words of 16-bit floats, rounded once.
template <DType kIn>
__device__ __forceinline__ uint32_t MultiplyWords(uint32_t x, uint32_t y) {
  uint32_t result;
  if constexpr (kIn == DType::kBF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  }
  return result;
}

// A chunk of rounded values times a gain of the same type.
template <DType kIn>
__device__ __forceinline__ void MultiplyRounded(const void* gain, int64_t at,
                                                uint32_t (&words)[kWords]) {
  const uint4 part = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(gain) + at));
  const uint32_t factors[kWords] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = MultiplyWords<kIn>(words[i], factors[i]);
}

// A chunk of a norm, its first value in column `at`.
template <DType kIn, bool kCentred>
__device__ __forceinline__ void NormalizeChunk(const Production& p, const ProductionBuffers& b,
                                               Moments moments, int64_t at,
                                               uint32_t (&words)[kWords]) {
  float values[kRowValues], vector[kRowValues];
  DecodeChunk<kIn>(words, values);
#pragma unroll
  for (float& value : values) value = (kCentred ? value - moments.mean : value) * moments.scale;
  if (b.gain && p.gain == kIn && p.rounded_first && !b.shift) {
    // The usual case, in half the instructions: a product of 16 bits, as the program has it.
    EncodeChunk<kIn>(values, words);
    MultiplyRounded<kIn>(b.gain, at, words);
    return;
  }
  if (p.rounded_first) RoundChunk<kIn>(values);
  if (b.gain) {
    LoadVector<kIn>(b.gain, p.gain, at, vector);
#pragma unroll
    for (int j = 0; j < kRowValues; ++j) values[j] *= vector[j];
  }
  if (p.rounded_second) RoundChunk<kIn>(values);
  if (b.shift) {
    LoadVector<kIn>(b.shift, p.shift, at, vector);
#pragma unroll
    for (int j = 0; j < kRowValues; ++j) values[j] += vector[j];
  }
  EncodeChunk<kIn>(values, words);
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

// A chunk of activation(x) * factor; `factor` is of no use where there is none.
template <DType kIn>
__device__ __forceinline__ void ActivateChunk(const Production& p, const uint32_t (&factor)[kWords],
                                              uint32_t (&words)[kWords]) {
  float values[kRowValues], factors[kRowValues];
  DecodeChunk<kIn>(words, values);
  ApplyActivation<kIn>(p.activation, values);
  if (p.has_factor) {
    DecodeChunk<kIn>(factor, factors);
#pragma unroll
    for (int j = 0; j < kRowValues; ++j) values[j] *= factors[j];
  }
  EncodeChunk<kIn>(values, words);
}

}  // namespace jaxfp8::cuda
