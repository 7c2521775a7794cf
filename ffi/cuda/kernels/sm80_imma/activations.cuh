// Rounds activations to int8, once for all CTAs of the product:
//
//   code  = saturate(round(value / step)),   step = max |line| / 127 over finite values
//   scale = step * the scale of the values
//
//   global      a line for each CTA; a thread takes every 256th run of 8 values
//      |  registers: the largest magnitude; shared memory: that of each warp
//   global      codes, lines of a multiple of 16 bytes with zeros at the end; the scale of the line
//
// Lines of int8 are copied to that form.

#pragma once

#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/quantize/quotient.cuh"
#include "cuda/kernels/sm80_imma/schedule.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::imma {

// Value (b, r, k) is at b * batch_stride + r * row_stride + k * depth_stride, in elements.
struct RowArguments {
  const void* values = nullptr;
  int64_t batch_stride = 0, row_stride = 0, depth_stride = 0;
  int32_t rows = 0, depth = 0;
  int32_t alignment = 1;         // of runs of 8 values, in bytes
  const float* given = nullptr;  // the scales of the values, or null
  Tiles tiles;
  int8_t* codes = nullptr;  // [batch, rows, pitch]
  int64_t pitch = 0;
  float* scale = nullptr;  // [batch, rows]
};

// Lets the next kernel of the stream start, as far as it does not wait for this one.
__device__ __forceinline__ void StartDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the kernel before, if it let this one start.
__device__ __forceinline__ void WaitForRows() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <DType kType>
inline constexpr int kWordsOfRun = 8 / kPerWord<kType>;

template <DType kType>
__device__ __forceinline__ void LoadEight(const RowArguments& a, const Bits<kType>* line, int k,
                                          uint32_t (&words)[kWordsOfRun<kType>]) {
  if (a.depth_stride == 1) return LoadRun(line + k, a.depth - k, a.alignment, words);
  Bits<kType> values[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (k + i < a.depth) values[i] = line[(k + i) * a.depth_stride];
  }
  LoadSome(values, 8, words);
}

// The largest finite magnitude of a line, for all threads.
template <DType kType>
__device__ __forceinline__ float LargestOfLine(const RowArguments& a, const Bits<kType>* line) {
  uint32_t largest = 0;  // as bits, in the order of magnitudes
  for (int k = 8 * threadIdx.x; k < a.depth; k += 8 * kThreads) {
    uint32_t words[kWordsOfRun<kType>];
    LoadEight<kType>(a, line, k, words);
#pragma unroll
    for (const uint32_t word : words) {
      float values[kPerWord<kType>];
      DecodeWord<kType>(word, values);
#pragma unroll
      for (const float value : values) {
        const uint32_t bits = BitsOf(value) & 0x7fffffffu;
        largest = bits < 0x7f800000u ? max(largest, bits) : largest;
      }
    }
  }
  __shared__ uint32_t of_warps[kThreads / 32];
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : of_warps) largest = max(largest, other);
  return FloatFromBits(largest);
}

// The codes of four values of a line.
template <DType kType>
__device__ __forceinline__ uint32_t RoundFour(const uint32_t* words, const FloatDivisor& step) {
  float values[4];
  DecodeWord<kType>(words[0], values);
  DecodeWord<kType>(words[1], values + 2);
#pragma unroll
  for (float& value : values) value = Quotient(value, step);
  return EncodeWord<DType::kS8>(values);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) RoundRows(const __grid_constant__ RowArguments a) {
  StartDependents();
  const int row = blockIdx.x;
  const int64_t batch = blockIdx.y, at = batch * a.rows + row;
  const auto* line =
      static_cast<const Bits<kType>*>(a.values) + batch * a.batch_stride + row * a.row_stride;
  [[maybe_unused]] FloatDivisor divisor;
  if constexpr (kType != DType::kS8) {
    const float step = ScaleOf<DType::kS8>(LargestOfLine<kType>(a, line));
    divisor = MakeFloatDivisor(step);
    if (threadIdx.x == 0) {
      a.scale[at] = a.given ? step * a.given[a.tiles.At(batch, row, 0)] : step;
    }
  }
  for (int64_t k = 8 * threadIdx.x; k < a.pitch; k += 8 * kThreads) {
    uint32_t words[kWordsOfRun<kType>];
    LoadEight<kType>(a, line, static_cast<int>(k), words);
    uint2 codes;
    if constexpr (kType == DType::kS8) {
      codes = make_uint2(words[0], words[1]);
    } else {
      codes = make_uint2(RoundFour<kType>(words, divisor), RoundFour<kType>(words + 2, divisor));
    }
    *reinterpret_cast<uint2*>(a.codes + at * a.pitch + k) = codes;
  }
}

}  // namespace jaxfp8::cuda::imma
