// Packs a side with K-contiguous lines.
//
//   source [lines, K]   -- a thread: kChunksPerThread runs, all loads first -->  registers
//   registers           -- Converter, 16 bytes a chunk                      -->  matrix [lines, K]

#pragma once

#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/pack/convert.cuh"

namespace jaxfp8::cuda {

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kPackThreads) PackRows(const PackArguments p) {
  using Chunk = Converter<kIn, kOut>;
  const uint32_t per_row = static_cast<uint32_t>(p.depth_padded / Chunk::kValues);
  const uint32_t rows = static_cast<uint32_t>(p.count_padded);
  const uint64_t chunks = uint64_t{per_row} * rows * static_cast<uint64_t>(p.batches);
  const uint64_t block = uint64_t{blockIdx.x} * (kPackThreads * kChunksPerThread);
  uint32_t in[kChunksPerThread][Chunk::kWordsIn];
  int64_t valid[kChunksPerThread];
  float scale[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const uint64_t chunk = block + i * kPackThreads + threadIdx.x;
    if (chunk >= chunks) break;
    const uint32_t line = static_cast<uint32_t>(chunk) / per_row;  // the host bounds `chunks`
    const int64_t k = int64_t{static_cast<uint32_t>(chunk) - line * per_row} * Chunk::kValues;
    const uint32_t batch = p.batches == 1 ? 0 : line / rows;
    const int64_t f = line - batch * rows;
    valid[i] = f < p.count ? p.depth - k : 0;
    const int64_t from = (p.batch + batch) * p.side_batch + (p.first + f) * p.side_free + k;
    scale[i] = valid[i] > 0 ? ScaleOfChunk(p, p.batch + batch, p.first + f, k) : 1.0f;
    LoadRun(static_cast<const Bits<kIn>*>(p.values) + (valid[i] > 0 ? from : 0),
            valid[i] > 0 ? valid[i] : 0, p.alignment, in[i]);
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const uint64_t chunk = block + i * kPackThreads + threadIdx.x;
    if (chunk >= chunks) break;
    uint32_t out[Chunk::kWordsOut] = {};
    if (valid[i] > 0) Chunk::Convert(p, valid[i], in[i], scale[i], out);
    static_cast<uint4*>(p.matrix)[chunk] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

}  // namespace jaxfp8::cuda
