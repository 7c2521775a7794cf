// Sums of the lines of an int8 or uint8 side along K, for zero points: the kernels behind
// `LaunchLineSums`.
//
//   SumLinesKContiguous   a warp per line: | lane 0: 16 codes | lane 1 | ... -> dp4a -> shuffle
//   SumLinesMnMajor       a lane sums 16 lines, a warp 512 lines x 32 K, a block 8 warps along K
//                         and the grid the rest of K; shared memory, then integer atomics

#pragma once

#include "cuda/kernels/common/vector.cuh"

namespace jaxfp8::cuda {

inline constexpr int kSumThreads = 256;

struct LineSumsArguments {
  const uint8_t* values;
  int32_t* sums;
  int64_t side_batch, side_free, side_depth, batch, first, count, depth;
  uint32_t sign_flip;
  bool is_signed;  // after the flip
  int alignment;
};

__device__ __forceinline__ int32_t SumOfBytes(uint32_t word, int32_t sum, bool is_signed) {
  if (is_signed) return __dp4a(static_cast<int>(word), 0x01010101, sum);
  return static_cast<int32_t>(__dp4a(word, 0x01010101u, static_cast<uint32_t>(sum)));
}

// Bytes past the end are zeros and must not be flipped: a flipped zero is -128.
static __global__ void __launch_bounds__(kSumThreads)
    SumLinesKContiguous(const LineSumsArguments p) {
  const int64_t line = int64_t{blockIdx.x} * (kSumThreads / 32) + threadIdx.x / 32;
  if (line >= p.count) return;
  const uint8_t* from =
      p.values + (p.batch + blockIdx.y) * p.side_batch + (p.first + line) * p.side_free;
  int32_t sum = 0;
  const int lane = threadIdx.x % 32;
  int64_t k = lane * 16;
  // Whole runs, several in flight.
  constexpr int kAhead = 8, kStride = 32 * 16;
  for (; p.alignment == 16 && k + (kAhead - 1) * kStride + 16 <= p.depth; k += kAhead * kStride) {
    uint4 values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      values[i] = *reinterpret_cast<const uint4*>(from + k + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      sum = SumOfBytes(values[i].x ^ p.sign_flip, sum, p.is_signed);
      sum = SumOfBytes(values[i].y ^ p.sign_flip, sum, p.is_signed);
      sum = SumOfBytes(values[i].z ^ p.sign_flip, sum, p.is_signed);
      sum = SumOfBytes(values[i].w ^ p.sign_flip, sum, p.is_signed);
    }
  }
  for (; k < p.depth; k += kStride) {
    uint32_t words[4];
    const int64_t available = p.depth - k;
    LoadRun(from + k, available, p.alignment, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t left = available - 4 * i;
      const uint32_t mask = left >= 4 ? ~0u : left <= 0 ? 0u : (1u << (8 * left)) - 1;
      sum = SumOfBytes(words[i] ^ (p.sign_flip & mask), sum, p.is_signed);
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) p.sums[blockIdx.y * p.count + line] = sum;
}

// Bytes, biased to 0 to 255, are added two to a word: 16 bits hold the sum of 257.
inline constexpr int kSumLines = 512, kSumWarps = kSumThreads / 32;
inline constexpr int kSumRowsInFlight = 8, kSumRows = 32;  // a warp's
inline constexpr int kSumDepth = kSumWarps * kSumRows;
static_assert(kSumRows <= 257);

// Loads up to 16 bytes of a row, and zeros after them.
static __device__ __noinline__ uint4 LoadUnalignedChunk(const uint8_t* from, int64_t count,
                                                        int alignment) {
  uint32_t words[4];
  LoadRun(from, count, alignment, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

static __global__ void __launch_bounds__(kSumThreads) SumLinesMnMajor(const LineSumsArguments p) {
  __shared__ uint32_t parts[kSumWarps][kSumLines];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t f = int64_t{blockIdx.x} * kSumLines + lane * 16;
  const int64_t available = p.count - f, start = int64_t{blockIdx.z} * kSumDepth + warp * kSumRows;
  const int rows = static_cast<int>(max(min(p.depth - start, int64_t{kSumRows}), int64_t{0}));
  const uint8_t* from = p.values + (p.batch + blockIdx.y) * p.side_batch + p.first + f;
  const bool aligned = p.alignment == 16 && available >= 16;
  uint32_t even[4] = {}, odd[4] = {};
#pragma unroll 1
  for (int i = 0; i < rows && available > 0; i += kSumRowsInFlight) {
    uint4 values[kSumRowsInFlight];
    if (aligned) {
#pragma unroll
      for (int j = 0; j < kSumRowsInFlight; ++j) {
        const int64_t k = start + min(i + j, rows - 1);
        values[j] = *reinterpret_cast<const uint4*>(from + k * p.side_depth);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kSumRowsInFlight; ++j) {
        const int64_t k = start + min(i + j, rows - 1);
        const uint4 slow = LoadUnalignedChunk(from + k * p.side_depth, available, p.alignment);
#pragma unroll
        for (int to = 0; to < kSumRowsInFlight; ++to) values[to] = to == j ? slow : values[to];
      }
    }
#pragma unroll
    for (int j = 0; j < kSumRowsInFlight; ++j) {
      const uint32_t words[4] = {values[j].x, values[j].y, values[j].z, values[j].w};
      const uint32_t mask = i + j < rows ? 0x00ff00ffu : 0u;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t biased = words[w] ^ p.sign_flip;
        even[w] += biased & mask, odd[w] += biased >> 8 & mask;
      }
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t sums[4] = {even[w] & 0xffffu, odd[w] & 0xffffu, even[w] >> 16, odd[w] >> 16};
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][lane * 16 + 4 * w + i] = sums[i];
  }
  __syncthreads();
  const int64_t block_depth = min(p.depth - int64_t{blockIdx.z} * kSumDepth, int64_t{kSumDepth});
  for (int at = threadIdx.x; at < kSumLines; at += kSumThreads) {
    const int64_t line = int64_t{blockIdx.x} * kSumLines + at;
    if (line >= p.count) break;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kSumWarps; ++i) sum += parts[i][at];
    const auto bias = static_cast<int32_t>(p.is_signed ? 128 * block_depth : 0);
    atomicAdd(p.sums + blockIdx.y * p.count + line, static_cast<int32_t>(sum) - bias);
  }
}

}  // namespace jaxfp8::cuda
