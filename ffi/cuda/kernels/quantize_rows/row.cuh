// A thread's part of a row of 16-bit floats: how it is loaded, decoded and summed.

#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_ROW_CUH_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_ROW_CUH_

#include "cuda/kernels/quantize/chunk.cuh"

namespace jaxfp8::cuda {

inline constexpr int kRowValues = 8;  // of a chunk: 16 bytes of 16-bit floats

// A thread's part of a row. A chunk exists as a whole or not at all; one that does not is zeros.
//   kChunks  chunks of a thread
//   group    threads of a row, a power of two from 32 to 1024
template <int kChunks>
struct RowPart {
  uint32_t words[kChunks][kWords];
  int64_t start;     // of the row, in elements
  int first, group;  // the first element of the thread in its row, and the threads of a row
  int columns;       // 0 where the thread has no row

  __device__ __forceinline__ int At(int i) const { return first + i * group * kRowValues; }
};

// Streams past the L1 cache, which the gain keeps.
__device__ __forceinline__ void LoadOnce(const void* x, int64_t at, uint32_t (&to)[kWords]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(static_cast<const uint16_t*>(x) + at));
}

template <int kChunks>
__device__ __forceinline__ void LoadRow(const void* x, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (uint32_t& word : row.words[i]) word = 0;
    if (row.At(i) < row.columns) LoadOnce(x, row.start + row.At(i), row.words[i]);
  }
}

// The sum over the threads of a row, in one order. Every thread of the block must call it.
__device__ __forceinline__ float SumOfGroup(float value, int group, float* shared) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  if (group == 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = group / 32, first = threadIdx.x / group * warps;
  const int lane = threadIdx.x % 32;
  value = lane < warps ? shared[first + lane] : 0.0f;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(~0u, value, lanes);
  return value;
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
__device__ __forceinline__ void LoadVector(const void* from, DType type, int at,
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

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ROWS_ROW_CUH_
