// Quantizes to 8 bits: which kernels run, and their launches. All are bound by memory. FP8 is
// rounded to int8 too, by rows that fit registers.
//
//   scales                              kernels                       reads of x
//   given                               QuantizeTiles                 1
//   a 1 x 128 or 128 x 128 tile         QuantizeTiles                 1
//   1 x 128, and 128 x 1 transposed     QuantizeTiles                 1
//   a row that fits registers           QuantizeRows                  1
//   a longer row, or the whole tensor   FindAmax, QuantizeTiles       2

#include <algorithm>

#include "common/shapes.h"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/kernels/quantize/chunk.cuh"
#include "cuda/kernels/quantize/quantize.h"
#include "cuda/kernels/quantize/tiles.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// The largest finite |x| of a tensor or of each row: the pass before `QuantizeTiles` where the
// values of one scale do not fit the registers of a block.
//
//   x, a segment   | block 0: kAmaxChunks x 256 x 16 bytes | block 1 | ...   --> atomicMax

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

// Quantizes with one scale per row: a row stays in registers from its amax to its codes.
//
//   x [rows, columns]   a row  | 16 bytes | 16 bytes | ...      `group` threads, 32 to 1024
//   registers           kChunks chunks a thread, all loads first
//   shared memory       the maximum across warps
//   codes, scale, amax  from the same registers; x is read once

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
  const float scale = ScaleOf<kOut>(FloatFromBits(largest), q.power_of_two);
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

namespace {

static_assert(kTransposeTile == kQuantizeTile);

QuantizeArguments MakeQuantizeArguments(const QuantizeProblem& p, const QuantizeBuffers& b) {
  QuantizeArguments q{};
  q.x = b.x, q.scale = b.scale, q.codes = static_cast<uint8_t*>(b.codes);
  q.transposed = p.transposed ? static_cast<uint8_t*>(b.codes_transposed) : nullptr;
  q.transposed_scale = p.transposed_scale ? b.transposed_scale : nullptr;
  q.amax = p.amax ? b.amax : nullptr;
  q.tensor_amax = p.amax && p.given_scale ? reinterpret_cast<uint32_t*>(b.amax) : nullptr;
  q.found_amax = TwoPasses(p) ? static_cast<uint32_t*>(b.workspace) : nullptr;
  q.rows = p.rows, q.columns = p.columns;
  q.tile_rows = p.tile_rows >= p.rows && p.tile_rows != kTransposeTile ? p.rows : p.tile_rows;
  q.power_of_two = p.power_of_two;
  q.tile_columns = p.tile_columns, q.tiles_across = TileCount(p.columns, p.tile_columns);
  // Also for one scale for the whole tensor: the end of x has to be aligned as well.
  q.x_aligned = AlignmentOf(b.x, {RowBytes(p)}) == 16;
  q.codes_aligned = AlignmentOf(b.codes, {p.columns}) >= 16 / SizeOf(p.in);
  q.transposed_aligned = AlignmentOf(b.codes_transposed, {p.rows}) == 16;
  return q;
}

template <DType kIn, DType kOut>
cudaError_t LaunchRows(const QuantizeProblem& p, const QuantizeArguments& q, cudaStream_t stream) {
  const int64_t chunks = TileCount(RowBytes(p), 16);
  int group = 32;
  while (group < 1024 && group * 4 < chunks) group *= 2;
  const int threads = std::max(group, kQuantizeThreads);
  const unsigned blocks = GridSize(TileCount(p.rows, threads / group));
  if (group * 4 >= chunks) {
    QuantizeRows<kIn, kOut, 4><<<blocks, threads, 0, stream>>>(q, group);
  } else {
    QuantizeRows<kIn, kOut, 8><<<blocks, threads, 0, stream>>>(q, group);
  }
  return cudaGetLastError();
}

template <DType kIn, DType kOut>
cudaError_t LaunchTiles(const QuantizeProblem& p, const QuantizeArguments& q, cudaStream_t stream) {
  const unsigned blocks =
      GridSize(TileCount(p.rows, kTransposeTile) * TileCount(p.columns, kTransposeTile));
  if (q.transposed_scale) {
    if constexpr (IsFloat8(kOut)) {
      QuantizeTiles<kIn, kOut, ScaleTile::kBoth128><<<blocks, kQuantizeThreads, 0, stream>>>(q);
    }
  } else if (p.given_scale || q.found_amax) {
    QuantizeTiles<kIn, kOut, ScaleTile::kKnown><<<blocks, kQuantizeThreads, 0, stream>>>(q);
  } else if (p.tile_rows == 1) {
    QuantizeTiles<kIn, kOut, ScaleTile::kRow128><<<blocks, kQuantizeThreads, 0, stream>>>(q);
  } else {
    QuantizeTiles<kIn, kOut, ScaleTile::kSquare128><<<blocks, kQuantizeThreads, 0, stream>>>(q);
  }
  return cudaGetLastError();
}

template <DType kIn>
cudaError_t LaunchAmax(const QuantizeProblem& p, const QuantizeArguments& q, cudaStream_t stream) {
  const int64_t segments = PerTensor(p) ? 1 : p.rows, length = p.rows * p.columns / segments;
  const cudaError_t cleared =
      cudaMemsetAsync(q.found_amax, 0, static_cast<size_t>(segments) * sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  constexpr int64_t kPerBlock = int64_t{kQuantizeThreads} * kAmaxChunks * kValues<kIn>;
  const dim3 grid(GridSize(TileCount(length, kPerBlock)), GridSize(segments));
  FindAmax<kIn><<<grid, kQuantizeThreads, 0, stream>>>(q, length);
  return cudaGetLastError();
}

template <DType kIn, DType kOut>
cudaError_t LaunchAs(const QuantizeProblem& p, const QuantizeArguments& q, cudaStream_t stream) {
  if (RowsInRegisters(p)) return LaunchRows<kIn, kOut>(p, q, stream);
  cudaError_t status = cudaSuccess;
  if (q.found_amax) status = LaunchAmax<kIn>(p, q, stream);
  if (q.tensor_amax) status = cudaMemsetAsync(q.tensor_amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  return LaunchTiles<kIn, kOut>(p, q, stream);
}

cudaError_t Dispatch(const QuantizeProblem& p, const QuantizeArguments& q, cudaStream_t stream) {
  if (IsFloat8(p.in)) {
    return p.in == DType::kE4M3 ? LaunchRows<DType::kE4M3, DType::kS8>(p, q, stream)
                                : LaunchRows<DType::kE5M2, DType::kS8>(p, q, stream);
  }
  return Visit<DType::kBF16, DType::kF16, DType::kF32>(
      p.in, cudaErrorInvalidValue, [&]<DType kIn>() {
        return Visit<DType::kE4M3, DType::kE5M2, DType::kS8>(
            p.out, cudaErrorInvalidValue,
            [&]<DType kOut>() { return LaunchAs<kIn, kOut>(p, q, stream); });
      });
}

// The transposed output after `QuantizeRows`: its codes are transposed, or x is quantized again if
// the rows of the transposed output are not 16-byte aligned.
Status TransposeCodes(const QuantizeProblem& p, const QuantizeBuffers& b, cudaStream_t stream) {
  if (p.rows % 16 == 0 && AlignmentOf(b.codes_transposed, {}) == 16) {
    PackRequest request;
    request.side.dtype = p.out, request.side.free_stride = 1, request.side.depth_stride = p.columns;
    request.lines.count = p.columns, request.lines.depth = p.rows;
    request.out = p.out, request.count_padded = p.columns, request.depth_padded = p.rows;
    return LaunchPack(request, b.codes, b.codes_transposed, stream);
  }
  QuantizeProblem again = p;
  again.given_scale = true, again.amax = false;
  QuantizeArguments q = MakeQuantizeArguments(again, b);
  q.codes = nullptr;
  return CudaError(Dispatch(again, q, stream), "quantizing for the transposed output");
}

}  // namespace

Status LaunchQuantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                      cudaStream_t stream) {
  JAXFP8_RETURN_IF_ERROR(QuantizeWhyNot(problem));
  if (problem.rows * problem.columns == 0) return {};
  const QuantizeArguments q = MakeQuantizeArguments(problem, buffers);
  JAXFP8_RETURN_IF_ERROR(CudaError(Dispatch(problem, q, stream), "quantizing"));
  if (!problem.transposed || !RowsInRegisters(problem)) return {};
  return TransposeCodes(problem, buffers, stream);
}

}  // namespace jaxfp8::cuda
