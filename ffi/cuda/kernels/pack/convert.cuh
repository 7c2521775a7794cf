// The arguments of the packing kernels, and the conversion of one chunk of 16 bytes.
//
//   in, registers    8-bit codes or floats of one line, consecutive along K
//   Converter        copy (and flip signs), or decode and encode
//   out, registers   16 bytes; zeros past the line's end

#pragma once

#include "cuda/kernels/common/divisor.h"
#include "cuda/kernels/common/element.cuh"
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

}  // namespace jaxfp8::cuda
