// Quantises with one scale per row: a row stays in registers from its amax to its codes.
//
//   x [rows, columns]   a row  | 16 bytes | 16 bytes | ...      `group` threads, 32 to 1024
//   registers           kChunks chunks a thread, all loads first
//   shared memory       the maximum across warps
//   codes, scale, amax  from the same registers; x is read once

#pragma once

#include "cuda/kernels/quantize/chunk.cuh"

namespace jaxfp8::cuda {

// The kernel.
//   kChunks  chunks of a thread
//   group    threads of a row, a power of two from 32 to 1024
template <DType kIn, DType kOut, int kChunks>
__global__ void __launch_bounds__(1024) QuantizeRows(const QuantizeArguments q, int group) {
  __shared__ uint32_t shared[32];
  constexpr int kPerChunk = kValues<kIn>;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / group) + threadIdx.x / group;
  const bool in_bounds = row < q.rows;
  const int first = threadIdx.x % group * kPerChunk;
  const int64_t start = in_bounds ? row * q.columns : 0, columns = in_bounds ? q.columns : 0;
  uint32_t words[kChunks][kWords];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t at = first + int64_t{i} * group * kPerChunk;
    LoadChunk<kIn>(q, at < columns ? start + at : 0, at < columns ? columns - at : 0, words[i]);
  }
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) packed = MaxMagnitudes<kIn>(words[i], packed);
  uint32_t largest = MaxOfGroup(MaxBits<kIn>(packed), group, shared);
  if (__syncthreads_or(largest >= kInfinityBits)) {
    uint32_t finite = 0;
#pragma unroll 1
    for (int64_t at = first; at < columns; at += int64_t{group} * kPerChunk) {
      finite = max(finite, MaxFiniteBits<kIn>(q.x, start + at, columns - at));
    }
    largest = MaxOfGroup(finite, group, shared);
  }
  if (!in_bounds) return;
  const float scale = ScaleOf<kOut>(FloatFromBits(largest));
  if (first == 0) {
    q.scale[row] = scale;
    if (q.amax) q.amax[row] = FloatFromBits(largest);
  }
  const FloatDivisor divisor = MakeFloatDivisor(scale);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t at = first + int64_t{i} * group * kPerChunk;
    if (at >= columns) break;
    uint32_t codes[kPerChunk / 4];
    ToCodes<kIn, kOut>(words[i], divisor, codes);
    StoreCodes(q.codes + start + at, columns - at, q.codes_aligned, codes);
  }
}

}  // namespace jaxfp8::cuda
