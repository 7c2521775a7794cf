// Copies, decodes and turns one side of a product; launches the sums of its lines. All of it is
// bound by memory.
//
// Two kernels write matrices: `PackRows` where the depth is contiguous in the source, `PackTurned`
// and its form for wide types where the free axis is. The latter go through shared memory, so that
// both ends touch memory in runs of at least 64 bytes.

#include <algorithm>

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/pack/line_sums.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkBytes = 16;      // what a thread writes at once
constexpr int kChunksPerThread = 4;  // loads in flight; set before measurement
constexpr uint32_t kFlipSigns = 0x80808080u;

// What the kernels know of a request; offsets in elements.
struct Pack {
  const void* values;
  const float* scale;         // null: not applied
  const int32_t* zero_point;  // null: not subtracted
  void* matrix;
  Tiles tiles;
  int64_t side_batch, side_free, side_depth;
  int64_t batch, batches, first, count, depth, count_padded, depth_padded;
  uint32_t flip;  // xor of every word of raw bytes
  int alignment;  // of any run that starts at a multiple of a chunk, see AlignmentOf
};

// Raw bytes (kOut is one byte wide), or values of kOut.
template <DType kIn, DType kOut>
struct Converter {
  static constexpr int kValues = kChunkBytes / SizeOf(kOut);  // in a chunk
  static constexpr int kWordsIn = kValues * SizeOf(kIn) / 4;
  static constexpr int kWordsOut = kChunkBytes / 4;

  // The chunk of line f that starts at depth k; values from `valid` on are padding.
  static __device__ __forceinline__ void Convert(const Pack& p, int64_t b, int64_t f, int64_t k,
                                                 int64_t valid, const uint32_t (&in)[kWordsIn],
                                                 uint32_t (&out)[kWordsOut]) {
    if constexpr (SizeOf(kOut) == 1) {
#pragma unroll
      for (int i = 0; i < kWordsOut; ++i) out[i] = in[i] ^ p.flip;
      if (valid < kValues) ClearFrom(static_cast<int>(valid), out);
    } else {
      float values[kValues];
#pragma unroll
      for (int i = 0; i < kWordsIn; ++i) DecodeWord<kIn>(in[i], values + i * kPerWord<kIn>);
      Dequantize(p, b, f, k, values);
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = i < valid ? values[i] : 0.0f;
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

  // Integers less their zero point are exact in float32 below 2^24.
  static __device__ __forceinline__ void Dequantize(const Pack& p, int64_t b, int64_t f, int64_t k,
                                                    float (&values)[kValues]) {
    if (!p.scale && !p.zero_point) return;
    const bool constant = p.tiles.ConstantAlongDepth();
    int64_t at = p.tiles.At(b, f, constant ? 0 : k);
    float scale = p.scale ? p.scale[at] : 1.0f;
    float zero = p.zero_point ? static_cast<float>(p.zero_point[at]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (!constant && i > 0 && k + i < p.depth) {
        at = p.tiles.At(b, f, k + i);
        if (p.scale) scale = p.scale[at];
        if (p.zero_point) zero = static_cast<float>(p.zero_point[at]);
      }
      values[i] = (values[i] - zero) * scale;
    }
  }
};

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kThreads) PackRows(const Pack p) {
  using Chunk = Converter<kIn, kOut>;
  const uint32_t per_row = static_cast<uint32_t>(p.depth_padded / Chunk::kValues);
  const uint32_t rows = static_cast<uint32_t>(p.count_padded);
  const uint64_t chunks = uint64_t{per_row} * rows * static_cast<uint64_t>(p.batches);
  const uint64_t block = uint64_t{blockIdx.x} * (kThreads * kChunksPerThread);
  uint32_t in[kChunksPerThread][Chunk::kWordsIn];
  int64_t b[kChunksPerThread], f[kChunksPerThread], k[kChunksPerThread], valid[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const uint64_t chunk = block + i * kThreads + threadIdx.x;
    if (chunk >= chunks) break;
    const uint32_t line = static_cast<uint32_t>(chunk) / per_row;  // the host bounds `chunks`
    k[i] = int64_t{static_cast<uint32_t>(chunk) - line * per_row} * Chunk::kValues;
    const uint32_t batch = p.batches == 1 ? 0 : line / rows;
    b[i] = p.batch + batch;
    f[i] = line - batch * rows;
    valid[i] = f[i] < p.count ? p.depth - k[i] : 0;
    f[i] += p.first;
    const int64_t from = b[i] * p.side_batch + f[i] * p.side_free + k[i];
    LoadRun(static_cast<const Bits<kIn>*>(p.values) + (valid[i] > 0 ? from : 0),
            valid[i] > 0 ? valid[i] : 0, p.alignment, in[i]);
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const uint64_t chunk = block + i * kThreads + threadIdx.x;
    if (chunk >= chunks) break;
    uint32_t out[Chunk::kWordsOut] = {};
    if (valid[i] > 0) Chunk::Convert(p, b[i], f[i], k[i], valid[i], in[i], out);
    static_cast<uint4*>(p.matrix)[chunk] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

struct TilePlace {
  int64_t b, f, k;  // f counts from `first`
};

// Tiles run along the lines first: neighbouring blocks read neighbouring memory.
__device__ __forceinline__ TilePlace PlaceOf(const Pack& p, int tile) {
  const int64_t across = (p.count_padded + tile - 1) / tile;
  const int64_t down = (p.depth_padded + tile - 1) / tile;
  const int64_t index = blockIdx.x;
  return {index / (across * down), index % across * tile, index / across % down * tile};
}

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kThreads) PackTurned(const Pack p) {
  using Chunk = Converter<kIn, kOut>;
  __shared__ uint32_t tile[kTurn * kTurn / 4];
  const TilePlace place = PlaceOf(p, kTurn);
  {
    const int f = threadIdx.x % 8 * 16, word = threadIdx.x / 8;
    const uint8_t* from = static_cast<const uint8_t*>(p.values) +
                          (p.batch + place.b) * p.side_batch + p.first + place.f + f;
    uint32_t rows[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t k = place.k + 4 * word + i;
      const int64_t there = k < p.depth ? p.count - place.f - f : 0;
      LoadRun(from + (there > 0 ? k * p.side_depth : 0), there > 0 ? there : 0, p.alignment,
              rows[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t turned[4];
      TurnFour(rows[0][i], rows[1][i], rows[2][i], rows[3][i], turned);
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[PackedWord(f + 4 * i + j, word)] = turned[j];
    }
  }
  __syncthreads();
  constexpr int kPerLine = kTurn / Chunk::kValues;
  char* matrix = static_cast<char*>(p.matrix);
#pragma unroll 4
  for (int i = threadIdx.x; i < kTurn * kPerLine; i += kThreads) {
    const int f = i / kPerLine, at = i % kPerLine * Chunk::kValues;
    if (place.f + f >= p.count_padded || place.k + at >= p.depth_padded) continue;
    uint32_t in[Chunk::kWordsIn], out[Chunk::kWordsOut] = {};
#pragma unroll
    for (int j = 0; j < Chunk::kWordsIn; ++j) in[j] = tile[PackedWord(f, at / 4 + j)];
    const int64_t valid = place.f + f < p.count ? p.depth - place.k - at : 0;
    if (valid > 0) {
      Chunk::Convert(p, p.batch + place.b, p.first + place.f + f, place.k + at, valid, in, out);
    }
    const int64_t to = (place.b * p.count_padded + place.f + f) * p.depth_padded + place.k + at;
    *reinterpret_cast<uint4*>(matrix + to * SizeOf(kOut)) =
        make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Wide sources: a tile of 64 x 64 floats, one element per access and lane.
constexpr int kWideTurn = 64;

template <DType kIn, DType kOut>
__global__ void __launch_bounds__(kThreads) PackTurnedWide(const Pack p) {
  __shared__ float tile[kWideTurn][kWideTurn + 1];
  const TilePlace place = PlaceOf(p, kWideTurn);
  const Bits<kIn>* from = static_cast<const Bits<kIn>*>(p.values) +
                          (p.batch + place.b) * p.side_batch + p.first + place.f;
#pragma unroll 8
  for (int i = threadIdx.x; i < kWideTurn * kWideTurn; i += kThreads) {
    const int f = i % kWideTurn, k = i / kWideTurn;
    const bool there = place.f + f < p.count && place.k + k < p.depth;
    const Bits<kIn> bits = there ? from[(place.k + k) * p.side_depth + f] : Bits<kIn>{0};
    tile[f][k] = Decode<kIn>(bits);
  }
  __syncthreads();
  Bits<kOut>* matrix = static_cast<Bits<kOut>*>(p.matrix);
#pragma unroll 8
  for (int i = threadIdx.x; i < kWideTurn * kWideTurn; i += kThreads) {
    const int k = i % kWideTurn, f = i / kWideTurn;
    if (place.f + f >= p.count_padded || place.k + k >= p.depth_padded) continue;
    float value = tile[f][k];
    if (p.scale && place.f + f < p.count && place.k + k < p.depth) {
      value *= p.scale[p.tiles.At(p.batch + place.b, p.first + place.f + f, place.k + k)];
    }
    const int64_t line = place.b * p.count_padded + place.f + f;
    matrix[line * p.depth_padded + place.k + k] = Encode<kOut>(value);
  }
}

template <DType kIn, DType kOut>
cudaError_t LaunchAs(const Pack& p, bool turned, cudaStream_t stream) {
  if (!turned) {
    const int64_t chunks = p.batches * p.count_padded * p.depth_padded * SizeOf(kOut) / kChunkBytes;
    constexpr int64_t kPerBlock = kThreads * kChunksPerThread;
    const unsigned blocks = GridSize((chunks + kPerBlock - 1) / kPerBlock);
    PackRows<kIn, kOut><<<blocks, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  constexpr int64_t kTile = SizeOf(kIn) == 1 ? kTurn : kWideTurn;
  const unsigned blocks = GridSize(p.batches * ((p.count_padded + kTile - 1) / kTile) *
                                   ((p.depth_padded + kTile - 1) / kTile));
  if constexpr (SizeOf(kIn) == 1) {
    PackTurned<kIn, kOut><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    PackTurnedWide<kIn, kOut><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <DType kOut>
cudaError_t DecodeTo(DType in, const Pack& p, bool turned, cudaStream_t stream) {
  return Visit<DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8, DType::kBF16, DType::kF16,
               DType::kF32>(in, cudaErrorInvalidValue,
                            [&]<DType kIn>() { return LaunchAs<kIn, kOut>(p, turned, stream); });
}

std::string WhyNot(const PackRequest& r) {
  const bool raw = SizeOf(r.out) == 1;
  const bool flips = r.out == DType::kS8 && r.side.dtype == DType::kU8;
  if (raw && r.out != r.side.dtype && !flips) {
    return "pack: 8-bit values can only be copied, or uint8 become int8";
  }
  if (!raw && !IsWideFloat(r.out)) return "pack: values can only be decoded to a float";
  if (r.count_padded < r.lines.count || r.depth_padded < r.lines.depth ||
      r.depth_padded * SizeOf(r.out) % kChunkBytes != 0) {
    return "pack: the padded matrix is smaller than the lines, or a row no multiple of 16 bytes";
  }
  if (r.lines.batches * r.count_padded * r.depth_padded / kChunkBytes * SizeOf(r.out) >> 31) {
    return "pack: the matrix is larger than 32 GiB";
  }
  return "";
}

Pack MakePack(const PackRequest& r, const void* values, void* matrix) {
  Pack p{};
  p.values = values, p.matrix = matrix, p.tiles = r.side.tiles;
  p.side_batch = r.side.batch, p.side_free = r.side.free, p.side_depth = r.side.depth;
  p.batch = r.lines.batch, p.batches = r.lines.batches, p.first = r.lines.first;
  p.count = r.lines.count, p.depth = r.lines.depth;
  p.count_padded = r.count_padded, p.depth_padded = r.depth_padded;
  p.flip = r.out == DType::kS8 && r.side.dtype == DType::kU8 ? kFlipSigns : 0;
  const int64_t size = SizeOf(r.side.dtype);
  const bool turned = r.side.IsMnMajor();
  const int64_t line_step = turned ? r.side.depth : r.side.free;
  p.alignment = AlignmentOf(static_cast<const char*>(values) + (turned ? p.first * size : 0),
                            {line_step * size, r.side.batch * size});
  return p;
}

__global__ void __launch_bounds__(kThreads)
    GatherScales(const ScaleRequest r, const float* scale, float* to) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t i = index % r.free_padded, j = index / r.free_padded;
  if (j >= r.depth_count) return;
  const int64_t f = r.first + i * r.free_step, b = r.batch + blockIdx.y;
  to[blockIdx.y * r.batch_stride + i * r.free_stride + j * r.depth_stride] =
      i < r.free_count ? scale[r.tiles.At(b, f, j * r.depth_step)] : 0.0f;
}

}  // namespace

std::string LaunchPack(const PackRequest& request, const void* values, const float* scale,
                       const int32_t* zero_point, void* matrix, cudaStream_t stream) {
  std::string wrong = WhyNot(request);
  if (!wrong.empty()) return wrong;
  if (request.lines.batches * request.count_padded * request.depth_padded == 0) return "";
  Pack p = MakePack(request, values, matrix);
  p.scale = request.apply_scale ? scale : nullptr;
  p.zero_point = request.subtract_zero_point ? zero_point : nullptr;
  const bool turned = request.side.IsMnMajor();
  const cudaError_t status =
      SizeOf(request.out) == 1 ? LaunchAs<DType::kU8, DType::kU8>(p, turned, stream)
                               : Visit<DType::kBF16, DType::kF16, DType::kF32>(
                                     request.out, cudaErrorInvalidValue, [&]<DType kOut>() {
                                       return DecodeTo<kOut>(request.side.dtype, p, turned, stream);
                                     });
  return CudaError(status, "packing an operand");
}

std::string LaunchLineSums(const Side& side, const Lines& lines, bool as_signed, const void* values,
                           int32_t* sums, cudaStream_t stream) {
  if (!IsInt8(side.dtype)) return "sums of lines: the values have to be int8 or uint8";
  if (lines.count * lines.batches == 0) return "";
  Sums p{};
  p.values = static_cast<const uint8_t*>(values), p.sums = sums;
  p.side_batch = side.batch, p.side_free = side.free, p.side_depth = side.depth;
  p.batch = lines.batch, p.first = lines.first, p.count = lines.count, p.depth = lines.depth;
  p.flip = side.dtype == DType::kU8 && as_signed ? kFlipSigns : 0;
  p.is_signed = side.dtype == DType::kS8 || as_signed;
  const unsigned batches = GridSize(lines.batches);
  if (!side.IsMnMajor()) {
    p.alignment = AlignmentOf(values, {side.free, side.batch});
    constexpr int64_t kPerBlock = kSumThreads / 32;
    const dim3 grid(GridSize((p.count + kPerBlock - 1) / kPerBlock), batches);
    SumRows<<<grid, kSumThreads, 0, stream>>>(p);
    return CudaError(cudaGetLastError(), "summing the lines of an operand");
  }
  p.alignment = AlignmentOf(p.values + p.first, {side.depth, side.batch});
  // Biased by 128, int8 values are 0 to 255, as uint8 ones are.
  p.flip = side.dtype == DType::kS8 ? kFlipSigns : 0;
  const cudaError_t cleared = cudaMemsetAsync(
      sums, 0, static_cast<size_t>(p.count * lines.batches) * sizeof(int32_t), stream);
  if (cleared != cudaSuccess) return CudaError(cleared, "clearing the sums of lines");
  const dim3 grid(GridSize((p.count + kSumLines - 1) / kSumLines), batches,
                  GridSize(std::max<int64_t>(1, (p.depth + kSumDepth - 1) / kSumDepth)));
  SumColumns<<<grid, kSumThreads, 0, stream>>>(p);
  return CudaError(cudaGetLastError(), "summing the lines of an operand");
}

std::string LaunchScales(const ScaleRequest& request, const float* scale, float* to,
                         cudaStream_t stream) {
  ScaleRequest r = request;
  r.free_padded = std::max(r.free_padded, r.free_count);
  const int64_t values = r.free_padded * r.depth_count;
  if (values * r.batches == 0) return "";
  const dim3 grid(GridSize((values + kThreads - 1) / kThreads), GridSize(r.batches));
  GatherScales<<<grid, kThreads, 0, stream>>>(r, scale, to);
  return CudaError(cudaGetLastError(), "laying out scales");
}

}  // namespace jaxfp8::cuda
