// The largest finite |x| of a tensor or of each row: the pass before `QuantizeTiles` where the
// values of one scale do not fit the registers of a block.
//
//   x, a segment   | block 0: kAmaxChunks x 256 x 16 bytes | block 1 | ...   --> atomicMax

#pragma once

#include "cuda/kernels/quantize/chunk.cuh"

namespace jaxfp8::cuda {

inline constexpr int kAmaxChunks = 8;  // chunks of a thread, all in flight

// Raises found_amax[blockIdx.y] to the largest finite magnitude of a segment of `length` values.
template <DType kIn>
__global__ void __launch_bounds__(kQuantizeThreads)
    FindAmax(const QuantizeArguments q, int64_t length) {
  __shared__ uint32_t shared[32];
  const int64_t start = blockIdx.y * length;
  const int64_t first =
      (int64_t{blockIdx.x} * kAmaxChunks * kQuantizeThreads + threadIdx.x) * kValues<kIn>;
  constexpr int64_t kStride = kQuantizeThreads * kValues<kIn>;
  uint32_t words[kAmaxChunks][kWords], largest = 0;
#pragma unroll
  for (int i = 0; i < kAmaxChunks; ++i) {
    const int64_t at = first + i * kStride;
    LoadChunk<kIn>(q, at < length ? start + at : 0, at < length ? length - at : 0, words[i]);
  }
#pragma unroll
  for (int i = 0; i < kAmaxChunks; ++i) {
    const int64_t at = first + i * kStride;
    largest = max(largest, MaxOfChunk<kIn>(q, start + at, length - at, words[i]));
  }
  UpdateAmax(q.found_amax + blockIdx.y, MaxOfGroup(largest, kQuantizeThreads, shared));
}

}  // namespace jaxfp8::cuda
