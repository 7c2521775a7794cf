// Packs an MN-major side: transposes it through shared memory. Both global accesses are runs of at
// least 64 bytes.
//
//   source [K, lines]      shared tile, rows = lines         matrix [lines, K]
//     k   | 16 lines |       line  | word of 4 k | ...         line | 16 bytes along K |
//     k+1 | 16 lines |       4 x 4 bytes are transposed
//     k+2 | 16 lines |       in registers on the way in
//     k+3 | 16 lines |
//
// `PackTransposed` takes 8-bit sources, 128 x 128 codes a block. `PackTransposedWide` takes wider
// sources, 64 x 64 floats a block, one element per access and lane.

#pragma once

#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/pack/convert.cuh"

namespace jaxfp8::cuda {

struct TileOrigin {
  int64_t b, f, k;  // b counts from `batch`, f from `first`
};

// Tiles are numbered along the lines first: neighbouring blocks read neighbouring memory.
__device__ __forceinline__ TileOrigin OriginOf(const PackArguments& p, int tile) {
  const int64_t across = (p.count_padded + tile - 1) / tile;
  const int64_t down = (p.depth_padded + tile - 1) / tile;
  const int64_t index = blockIdx.x;
  return {index / (across * down), index % across * tile, index / across % down * tile};
}

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kPackThreads) PackTransposed(const PackArguments p) {
  using Chunk = Converter<kIn, kOut>;
  __shared__ uint32_t tile[kTransposeTile * kTransposeTile / 4];
  const TileOrigin origin = OriginOf(p, kTransposeTile);
  {
    const int f = threadIdx.x % 8 * 16, word = threadIdx.x / 8;
    const uint8_t* from = static_cast<const uint8_t*>(p.values) +
                          (p.batch + origin.b) * p.side_batch + p.first + origin.f + f;
    uint32_t rows[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t k = origin.k + 4 * word + i;
      const int64_t available = k < p.depth ? p.count - origin.f - f : 0;
      LoadRun(from + (available > 0 ? k * p.side_depth : 0), available > 0 ? available : 0,
              p.alignment, rows[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t transposed[4];
      Transpose4x4Bytes(rows[0][i], rows[1][i], rows[2][i], rows[3][i], transposed);
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[PackSharedWord(f + 4 * i + j, word)] = transposed[j];
    }
  }
  __syncthreads();
  constexpr int kChunksPerLine = kTransposeTile / Chunk::kValues;
  char* matrix = static_cast<char*>(p.matrix);
#pragma unroll 4
  for (int i = threadIdx.x; i < kTransposeTile * kChunksPerLine; i += kPackThreads) {
    const int f = i / kChunksPerLine, at = i % kChunksPerLine * Chunk::kValues;
    if (origin.f + f >= p.count_padded || origin.k + at >= p.depth_padded) continue;
    uint32_t in[Chunk::kWordsIn], out[Chunk::kWordsOut] = {};
#pragma unroll
    for (int j = 0; j < Chunk::kWordsIn; ++j) in[j] = tile[PackSharedWord(f, at / 4 + j)];
    const int64_t valid = origin.f + f < p.count ? p.depth - origin.k - at : 0;
    if (valid > 0) {
      const float scale =
          ScaleOfChunk(p, p.batch + origin.b, p.first + origin.f + f, origin.k + at);
      Chunk::Convert(p, valid, in, scale, out);
    }
    const int64_t to = (origin.b * p.count_padded + origin.f + f) * p.depth_padded + origin.k + at;
    *reinterpret_cast<uint4*>(matrix + to * SizeOf(kOut)) =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Wide sources: a tile of 64 x 64 floats, one element per access and lane.
constexpr int kWideTransposeTile = 64;

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kPackThreads) PackTransposedWide(const PackArguments p) {
  __shared__ float tile[kWideTransposeTile][kWideTransposeTile + 1];
  const TileOrigin origin = OriginOf(p, kWideTransposeTile);
  const Bits<kIn>* from = static_cast<const Bits<kIn>*>(p.values) +
                          (p.batch + origin.b) * p.side_batch + p.first + origin.f;
#pragma unroll 8
  for (int i = threadIdx.x; i < kWideTransposeTile * kWideTransposeTile; i += kPackThreads) {
    const int f = i % kWideTransposeTile, k = i / kWideTransposeTile;
    const bool in_bounds = origin.f + f < p.count && origin.k + k < p.depth;
    const Bits<kIn> bits = in_bounds ? from[(origin.k + k) * p.side_depth + f] : Bits<kIn>{0};
    tile[f][k] = Decode<kIn>(bits);
  }
  __syncthreads();
  Bits<kOut>* matrix = static_cast<Bits<kOut>*>(p.matrix);
#pragma unroll 8
  for (int i = threadIdx.x; i < kWideTransposeTile * kWideTransposeTile; i += kPackThreads) {
    const int k = i % kWideTransposeTile, f = i / kWideTransposeTile;
    if (origin.f + f >= p.count_padded || origin.k + k >= p.depth_padded) continue;
    const int64_t line = origin.b * p.count_padded + origin.f + f;
    matrix[line * p.depth_padded + origin.k + k] = Encode<kOut>(tile[f][k]);
  }
}

}  // namespace jaxfp8::cuda
