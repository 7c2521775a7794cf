// Packs a side of a product: the arguments and the kernels. All convert a chunk of 16 bytes at a
// time.
//
//   in, registers    8-bit codes or floats of one line, consecutive along K
//   Converter        copy (and flip signs), or decode and encode
//   out, registers   16 bytes; zeros past the line's end

#pragma once

#include "cuda/kernels/common/divisor.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

inline constexpr int kPackThreads = 256;
inline constexpr int kChunkBytes = 16;      // one store of a thread
inline constexpr int kChunksPerThread = 4;  // loads in flight
inline constexpr uint32_t kSignBits = 0x80808080u;

// The arguments of the kernels. Strides are in elements.
struct PackArguments {
  const void* values;
  void* matrix;
  int64_t side_batch, side_free, side_depth;
  int64_t batch, batches, first, count, depth, count_padded, depth_padded;
  uint32_t sign_flip;  // XORed with every word of codes
  int alignment;       // in bytes, of runs starting at a multiple of a chunk
  // Of the side's tiles: that of line f and value k of batch index b is at b * scale_batch +
  // f / tile_lines * scale_line + k / tile_depth * scale_depth.
  const uint8_t* exponents;
  int64_t scale_batch, scale_line, scale_depth;
  Divisor tile_lines, tile_depth;
};

// The scale of a chunk that begins at value k of line f, counted as in the side.
__device__ __forceinline__ float ScaleOfChunk(const PackArguments& p, int64_t b, int64_t f,
                                              int64_t k) {
  if (!p.exponents) return 1.0f;
  const int64_t line = p.tile_lines.Quotient(static_cast<int32_t>(f));
  const int64_t along = p.tile_depth.Quotient(static_cast<int32_t>(k));
  return DecodeE8M0(
      __ldg(p.exponents + b * p.scale_batch + line * p.scale_line + along * p.scale_depth));
}

// Converts a chunk: copies codes if kOut has one byte, else decodes them to kOut.
template <DType kIn, DType kOut>
struct Converter {
  static constexpr int kValues = kChunkBytes / SizeOf(kOut);  // in a chunk
  static constexpr int kWordsIn = kValues * SizeOf(kIn) / 4;
  static constexpr int kWordsOut = kChunkBytes / 4;

  // Converts a chunk. Values from `valid` on become 0.
  //   scale  multiplies what is decoded
  static __device__ __forceinline__ void Convert(const PackArguments& p, int64_t valid,
                                                 const uint32_t (&in)[kWordsIn], float scale,
                                                 uint32_t (&out)[kWordsOut]) {
    if constexpr (SizeOf(kOut) == 1) {
#pragma unroll
      for (int i = 0; i < kWordsOut; ++i) out[i] = in[i] ^ p.sign_flip;
      if (valid < kValues) ClearFrom(static_cast<int>(valid), out);
    } else {
      float values[kValues];
#pragma unroll
      for (int i = 0; i < kWordsIn; ++i) DecodeWord<kIn>(in[i], values + i * kPerWord<kIn>);
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = i < valid ? values[i] * scale : 0.0f;
#pragma unroll
      for (int i = 0; i < kWordsOut; ++i) out[i] = EncodeWord<kOut>(values + i * kPerWord<kOut>);
    }
  }

  static __device__ __forceinline__ void ClearFrom(int valid, uint32_t (&words)[kWordsOut]) {
#pragma unroll
    for (int i = 0; i < kWordsOut; ++i) {
      const int left = valid - 4 * i;
      if (left <= 0) words[i] = 0;
      if (left > 0 && left < 4) words[i] &= (1u << (8 * left)) - 1;
    }
  }
};

// Packs a side with K-contiguous lines.
//
//   source [lines, K]   -- a thread: kChunksPerThread runs, all loads first -->  registers
//   registers           -- Converter, 16 bytes a chunk                      -->  matrix [lines, K]

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
