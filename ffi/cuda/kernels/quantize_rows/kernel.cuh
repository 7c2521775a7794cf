// Norm or gate, amax, scale and codes of a row in one pass over memory.
//
//   x [rows, columns]   a row  | 16 bytes | 16 bytes | ...      `group` threads, 32 to 1024
//   registers           kChunks chunks a thread, all loads first; the producer replaces them
//   shared memory       sums and the maximum across warps
//   gain, shift         from the L1 cache, where every row of an SM finds them
//   codes, scale        from the same registers

#pragma once

#include "cuda/kernels/quantize_rows/producers.cuh"

namespace jaxfp8::cuda {

// The elementwise maximum of two words of magnitudes; NaN is above all.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxOrNan(uint32_t largest, uint32_t x) {
  uint32_t result;
  if constexpr (kIn == DType::kBF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  }
  return result;
}

// The amax of a row. As integers, the bits of magnitudes are in their order, NaN above all.
template <DType kIn, int kChunks>
__device__ __forceinline__ float AmaxOf(const RowPart<kChunks>& row, uint32_t* shared) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (uint32_t word : row.words[i]) packed = MaxOrNan<kIn>(packed, word);
  }
  float values[2];
  DecodeWord<kIn>(packed, values);
  const uint32_t largest = max(BitsOf(values[0]), BitsOf(values[1]));
  return FloatFromBits(MaxOfGroup(largest, row.group, shared));
}

template <DType kOut>
__device__ __forceinline__ float ScaleOfRow(const RowsProblem& p, float amax) {
  if (amax == 0.0f) return p.of_zeros;
  if (amax != amax) return p.of_nan;
  constexpr float kPer = 1.0f / kHighest<kOut>;
  return fmaxf(fmaxf(amax, p.amax_floor) * kPer, p.scale_floor);
}

// Divides a row by its scale and stores its codes.
template <DType kIn, DType kOut, int kChunks, typename Divide>
__device__ __forceinline__ void StoreRow(const RowPart<kChunks>& row, uint8_t* to, Divide divide) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    uint32_t codes[kRowValues / 4];
    DivideChunk<kIn, kOut>(row.words[i], divide, codes);
    StoreCodes(to + row.At(i), kRowValues, true, codes);
  }
}

template <DType kIn, DType kOut, Producer kProducer, int kChunks>
__global__ void __launch_bounds__(1024)
    QuantizeProduced(const RowsProblem p, const RowsBuffers b, int group) {
  __shared__ float sums[2][32];
  __shared__ uint32_t maxima[32];
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / group) + threadIdx.x / group;
  const bool in_bounds = index < p.rows;
  RowPart<kChunks> row;
  row.start = index * p.columns, row.columns = in_bounds ? static_cast<int>(p.columns) : 0;
  row.first = static_cast<int>(threadIdx.x) % group * kRowValues, row.group = group;
  LoadRow(b.x, row);
  if constexpr (kProducer == Producer::kElementwise) {
    ApplyElementwise<kIn>(p, b, row);
  } else {
    constexpr bool kCentred = kProducer == Producer::kLayerNorm;
    PrefetchVectors(p, b, row);
    Normalize<kIn, kCentred>(p, b, MomentsOf<kIn, kCentred>(p, row, sums), row);
  }
  const float amax = AmaxOf<kIn>(row, maxima), scale = ScaleOfRow<kOut>(p, amax);
  if (!in_bounds) return;
  if (row.first == 0) b.scale[index] = scale, b.amax[index] = amax;
  const FloatDivisor divisor = MakeFloatDivisor(scale == 0.0f && IsFloat8(kOut) ? NAN : scale);
  uint8_t* codes = static_cast<uint8_t*>(b.codes) + row.start;
  if (InRange(amax, divisor)) {
    StoreRow<kIn, kOut>(row, codes, [=](float x) { return QuotientInRange(x, divisor); });
  } else {
    StoreRow<kIn, kOut>(row, codes, [=](float x) { return Quotient(x, divisor); });
  }
}

}  // namespace jaxfp8::cuda
