// A thread's part of a row of 16-bit floats.

#pragma once

#include "cuda/kernels/produce/produce.cuh"

namespace jaxfp8::cuda {

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

template <int kChunks>
__device__ __forceinline__ void LoadRow(const void* x, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (uint32_t& word : row.words[i]) word = 0;
    if (row.At(i) < row.columns) LoadOnce(x, row.start + row.At(i), row.words[i]);
  }
}

}  // namespace jaxfp8::cuda
