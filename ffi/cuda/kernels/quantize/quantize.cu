// From wide floats to 8 bits. Bound by memory; every path but one scale for all reads x once.
//
//   QuantizeRows   a scale per row: a row stays in the registers of 32 to 1024 threads
//   QuantizeTiles  128 x 128 values in the registers of a block: scales of 1x128 and 128x128 tiles,
//                  or known ones, beside which it can find the amax of all; turns the codes through
//                  shared memory for a second output
//   FindAmax       before QuantizeTiles, for one scale for all and for rows that are too long

#include <algorithm>

#include "common/shapes.h"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/kernels/quantize/chunk.cuh"
#include "cuda/kernels/quantize/plan.h"
#include "cuda/kernels/quantize/quantize.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 256;
// `group` threads to a row, 16 bytes each, kChunks times.
template <DType kIn, DType kOut, int kChunks>
__global__ void __launch_bounds__(1024) QuantizeRows(const Quantize q, int group) {
  __shared__ uint32_t shared[32];
  constexpr int kPer = kValues<kIn>;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / group) + threadIdx.x / group;
  const bool there = row < q.rows;
  const int first = threadIdx.x % group * kPer;
  const int64_t start = there ? row * q.columns : 0, columns = there ? q.columns : 0;
  uint32_t words[kChunks][kWords];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t at = first + int64_t{i} * group * kPer;
    LoadX<kIn>(q, at < columns ? start + at : 0, at < columns ? columns - at : 0, words[i]);
  }
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) packed = LargestOf<kIn>(words[i], packed);
  uint32_t largest = MaxOfGroup(LargestBits<kIn>(packed), group, shared);
  if (__syncthreads_or(largest >= kInfinityBits)) {
    uint32_t finite = 0;
#pragma unroll 1
    for (int64_t at = first; at < columns; at += int64_t{group} * kPer) {
      finite = max(finite, LargestFinite<kIn>(q.x, start + at, columns - at));
    }
    largest = MaxOfGroup(finite, group, shared);
  }
  if (!there) return;
  const float scale = ScaleOf<kOut>(FloatFromBits(largest));
  if (first == 0) {
    q.scale[row] = scale;
    if (q.amax) q.amax[row] = FloatFromBits(largest);
  }
  const Divisor divisor = MakeDivisor(scale);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t at = first + int64_t{i} * group * kPer;
    if (at >= columns) break;
    uint32_t codes[kPer / 4];
    ToCodes<kIn, kOut>(words[i], divisor, codes);
    StoreCodes(q.codes + start + at, columns - at, q.codes_aligned, codes);
  }
}

enum class Grain { kRow128, kSquare128, kKnown };

// A block's tile of x. Threads that share threadIdx.x / kAcross hold kDown consecutive rows.
template <DType kIn>
struct Tile {
  static constexpr int kAcross = kTurn / kValues<kIn>;  // threads to a row
  static constexpr int kDown = kTurn * kAcross / kThreads;
  uint32_t words[kDown][kWords];
};

// The largest finite magnitudes of a thread's runs, from row `r` on.
template <DType kIn>
__device__ __forceinline__ void LargestOfTile(const Quantize& q, const Tile<kIn>& tile, int64_t r,
                                              int64_t c, uint32_t (&largest)[Tile<kIn>::kDown]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kDown; ++i) {
    largest[i] = LargestBits<kIn>(LargestOf<kIn>(tile.words[i], 0));
    most = max(most, largest[i]);
  }
  if (most < kInfinityBits) return;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kDown; ++i) {
    if (largest[i] < kInfinityBits) continue;
    largest[i] = LargestFinite<kIn>(q.x, (r + i) * q.columns + c, q.columns - c);
  }
}

// The largest finite magnitude of a block's tile, of which this thread's first row is `r`.
template <DType kIn>
__device__ __forceinline__ uint32_t LargestOfBlock(const Quantize& q, const Tile<kIn>& tile,
                                                   int64_t r, int64_t c, uint32_t* shared) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kDown; ++i) packed = LargestOf<kIn>(tile.words[i], packed);
  uint32_t largest = LargestBits<kIn>(packed);
  if (largest >= kInfinityBits) {
    largest = 0;
    const int64_t end = min(r + Tile<kIn>::kDown, q.rows);
#pragma unroll 1
    for (int64_t i = r; i < end; ++i) {
      largest = max(largest, LargestFinite<kIn>(q.x, i * q.columns + c, q.columns - c));
    }
  }
  return MaxOfGroup(largest, kThreads, shared);
}

// The amax of all, of which a block has found its part.
__device__ __forceinline__ void Raise(uint32_t* amax, uint32_t found) {
  if (threadIdx.x == 0 && found > 0) atomicMax(amax, found);
}

// The largest finite magnitude of 16 bytes that came from `at`.
template <DType kIn>
__device__ __forceinline__ uint32_t LargestOfRun(const Quantize& q, int64_t at, int64_t count,
                                                 const uint32_t (&words)[kWords]) {
  const uint32_t largest = LargestBits<kIn>(LargestOf<kIn>(words, 0));
  return largest < kInfinityBits ? largest : LargestFinite<kIn>(q.x, at, count);
}

// The largest value of each of kCount rows over `kLanes` neighbouring lanes, each lane of which
// holds kCount; the result is that of row `RowOfLane`. Every exchange halves the rows a lane is
// left with.
template <int kLanes, int kCount>
__device__ __forceinline__ uint32_t MaxOfRows(const uint32_t (&rows)[kCount]) {
  constexpr int kStep = kLanes / 2, kHalf = kCount > 1 ? kCount / 2 : 1;
  const bool upper = threadIdx.x & kStep;
  uint32_t left[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    constexpr int kOther = kCount > 1 ? kHalf : 0;
    const uint32_t kept = upper ? rows[kOther + i] : rows[i];
    const uint32_t given = upper ? rows[i] : rows[kOther + i];
    left[i] = max(kept, __shfl_xor_sync(~0u, given, kStep));
  }
  if constexpr (kStep == 1) {
    return left[0];
  } else {
    return MaxOfRows<kStep>(left);
  }
}

template <int kCount, int kLanes>
__device__ __forceinline__ int RowOfLane() {
  return static_cast<int>(threadIdx.x % kLanes) / (kLanes / kCount);
}

// The scale of a row of the block's tile, given or from an amax found before.
template <DType kOut>
__device__ __forceinline__ float KnownScale(const Quantize& q, int64_t row, int64_t column_tile) {
  const int64_t down = q.tile_rows == 1 ? row : q.tile_rows == kTurn ? row / kTurn : 0;
  const int64_t at = down * q.across + (q.across == 1 ? 0 : column_tile);
  if (!q.found) return q.scale[at];
  const float amax = FloatFromBits(q.found[at]), scale = ScaleOf<kOut>(amax);
  if (column_tile == 0 && (q.tile_rows == 1 || row == 0)) {
    q.scale[at] = scale;
    if (q.amax) q.amax[at] = amax;
  }
  return scale;
}

// The new scale of a row, which the thread that is `first` on it writes.
template <DType kOut, Grain kGrain>
__device__ __forceinline__ float NewScale(const Quantize& q, int64_t row, int64_t column_tile,
                                          bool first, uint32_t largest) {
  const int64_t down = kGrain == Grain::kRow128 ? row : row / kTurn;
  const float amax = FloatFromBits(largest), scale = ScaleOf<kOut>(amax);
  if (first && (kGrain == Grain::kRow128 || row % kTurn == 0)) {
    q.scale[down * q.across + column_tile] = scale;
    if (q.amax) q.amax[down * q.across + column_tile] = amax;
  }
  return scale;
}

// The codes of a tile lie in shared memory as words of four rows of a column.
template <DType kIn>
__device__ __forceinline__ void StageTurned(
    const uint32_t (&codes)[Tile<kIn>::kDown][kValues<kIn> / 4], int row, int column,
    uint32_t* stage) {
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kDown; i += 4) {
#pragma unroll
    for (int j = 0; j < kValues<kIn> / 4; ++j) {
      uint32_t turned[4];
      TurnFour(codes[i][j], codes[i + 1][j], codes[i + 2][j], codes[i + 3][j], turned);
#pragma unroll
      for (int k = 0; k < 4; ++k) stage[CodeWord(column + 4 * j + k, (row + i) / 4)] = turned[k];
    }
  }
}

__device__ __forceinline__ void StoreTurned(const Quantize& q, int64_t row, int64_t column,
                                            const uint32_t* stage) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kTurn * kTurn / 16; i += kThreads) {
    const int c = i / (kTurn / 16), r = i % (kTurn / 16) * 16;
    if (column + c >= q.columns || row + r >= q.rows) continue;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = stage[CodeWord(c, r / 4 + j)];
    StoreCodes(q.turned + (column + c) * q.rows + row + r, q.rows - row - r, q.turned_aligned,
               words);
  }
}

template <DType kIn, DType kOut, Grain kGrain>
__global__ void __launch_bounds__(kThreads) QuantizeTiles(const Quantize q) {
  using T = Tile<kIn>;
  __shared__ uint32_t shared[32];
  __shared__ uint32_t stage[kTurn * kTurn / 4];
  const int64_t across = (q.columns + kTurn - 1) / kTurn;
  // After a pass over x its end is what the L2 cache still holds: begin there.
  const int64_t index = kGrain == Grain::kKnown ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t top = index / across * kTurn, column_tile = index % across;
  const int row = threadIdx.x / T::kAcross * T::kDown;
  const int column = threadIdx.x % T::kAcross * kValues<kIn>;
  const int64_t c = column_tile * kTurn + column;
  T tile;
#pragma unroll
  for (int i = 0; i < T::kDown; ++i) {
    const int64_t r = top + row + i;
    const bool there = r < q.rows && c < q.columns;
    LoadX<kIn>(q, there ? r * q.columns + c : 0, there ? q.columns - c : 0, tile.words[i]);
  }
  __shared__ Divisor divisors[kTurn];
  if constexpr (kGrain == Grain::kKnown) {
    if (q.raised) Raise(q.raised, LargestOfBlock<kIn>(q, tile, top + row, c, shared));
    if (threadIdx.x < kTurn && top + threadIdx.x < q.rows) {
      divisors[threadIdx.x] = MakeDivisor(KnownScale<kOut>(q, top + threadIdx.x, column_tile));
    }
  } else {
    if constexpr (kGrain == Grain::kRow128) {
      uint32_t largest[T::kDown];
      LargestOfTile<kIn>(q, tile, top + row, c, largest);
      const uint32_t found = MaxOfRows<T::kAcross>(largest);
      const int r = row + RowOfLane<T::kDown, T::kAcross>();
      const bool first = threadIdx.x % (T::kAcross / T::kDown) == 0 && top + r < q.rows;
      const float scale = NewScale<kOut, kGrain>(q, top + r, column_tile, first, found);
      divisors[r] = MakeDivisor(scale);
    } else {
      const uint32_t found = LargestOfBlock<kIn>(q, tile, top + row, c, shared);
      if (threadIdx.x < kTurn) {
        const bool first = threadIdx.x == 0;
        divisors[threadIdx.x] =
            MakeDivisor(NewScale<kOut, kGrain>(q, top, column_tile, first, found));
      }
    }
  }
  __syncthreads();
  uint32_t codes[T::kDown][kValues<kIn> / 4];
#pragma unroll
  for (int i = 0; i < T::kDown; ++i) {
    ToCodes<kIn, kOut>(tile.words[i], divisors[row + i], codes[i]);
    const int64_t r = top + row + i;
    if (q.codes && r < q.rows && c < q.columns) {
      StoreCodes(q.codes + r * q.columns + c, q.columns - c, q.codes_aligned, codes[i]);
    }
  }
  if (!q.turned) return;
  StageTurned<kIn>(codes, row, column, stage);
  __syncthreads();
  StoreTurned(q, top, column_tile * kTurn, stage);
}

constexpr int kAmaxChunks = 8;  // 16-byte loads in flight to a thread; set before measurement

// Raises found[blockIdx.y] to the largest finite magnitude of a stretch of `length` values.
template <DType kIn>
__global__ void __launch_bounds__(kThreads) FindAmax(const Quantize q, int64_t length) {
  __shared__ uint32_t shared[32];
  const int64_t start = blockIdx.y * length;
  const int64_t first = (int64_t{blockIdx.x} * kAmaxChunks * kThreads + threadIdx.x) * kValues<kIn>;
  constexpr int64_t kStride = kThreads * kValues<kIn>;
  uint32_t words[kAmaxChunks][kWords], largest = 0;
#pragma unroll
  for (int i = 0; i < kAmaxChunks; ++i) {
    const int64_t at = first + i * kStride;
    LoadX<kIn>(q, at < length ? start + at : 0, at < length ? length - at : 0, words[i]);
  }
#pragma unroll
  for (int i = 0; i < kAmaxChunks; ++i) {
    const int64_t at = first + i * kStride;
    largest = max(largest, LargestOfRun<kIn>(q, start + at, length - at, words[i]));
  }
  Raise(q.found + blockIdx.y, MaxOfGroup(largest, kThreads, shared));
}

// ------------------------------------------------------------------------------------ launching

static_assert(kTurn == kQuantizeTile);

Quantize MakeQuantize(const QuantizeProblem& p, const QuantizeBuffers& b) {
  Quantize q{};
  q.x = b.x, q.scale = b.scale, q.codes = static_cast<uint8_t*>(b.codes);
  q.turned = p.transposed ? static_cast<uint8_t*>(b.codes_transposed) : nullptr;
  q.amax = p.amax ? b.amax : nullptr;
  q.raised = p.amax && p.given_scale ? reinterpret_cast<uint32_t*>(b.amax) : nullptr;
  q.found = TwoPasses(p) ? static_cast<uint32_t*>(b.workspace) : nullptr;
  q.rows = p.rows, q.columns = p.columns;
  q.tile_rows = p.tile_rows >= p.rows && p.tile_rows != kTurn ? p.rows : p.tile_rows;
  q.tile_columns = p.tile_columns, q.across = TileCount(p.columns, p.tile_columns);
  // A stretch of all rows is a single run, but its end has to be a multiple as well.
  q.x_aligned = AlignmentOf(b.x, {RowBytes(p)}) == 16;
  q.codes_aligned = AlignmentOf(b.codes, {p.columns}) >= 16 / SizeOf(p.in);
  q.turned_aligned = AlignmentOf(b.codes_transposed, {p.rows}) == 16;
  return q;
}

template <DType kIn, DType kOut>
cudaError_t LaunchRows(const QuantizeProblem& p, const Quantize& q, cudaStream_t stream) {
  const int64_t chunks = TileCount(RowBytes(p), 16);
  int group = 32;
  while (group < 1024 && group * 4 < chunks) group *= 2;
  const int threads = std::max(group, kThreads);
  const unsigned blocks = GridSize(TileCount(p.rows, threads / group));
  if (group * 4 >= chunks) {
    QuantizeRows<kIn, kOut, 4><<<blocks, threads, 0, stream>>>(q, group);
  } else {
    QuantizeRows<kIn, kOut, 8><<<blocks, threads, 0, stream>>>(q, group);
  }
  return cudaGetLastError();
}

template <DType kIn, DType kOut>
cudaError_t LaunchTiles(const QuantizeProblem& p, const Quantize& q, cudaStream_t stream) {
  const unsigned blocks = GridSize(TileCount(p.rows, kTurn) * TileCount(p.columns, kTurn));
  if (p.given_scale || q.found) {
    QuantizeTiles<kIn, kOut, Grain::kKnown><<<blocks, kThreads, 0, stream>>>(q);
  } else if (p.tile_rows == 1) {
    QuantizeTiles<kIn, kOut, Grain::kRow128><<<blocks, kThreads, 0, stream>>>(q);
  } else {
    QuantizeTiles<kIn, kOut, Grain::kSquare128><<<blocks, kThreads, 0, stream>>>(q);
  }
  return cudaGetLastError();
}

template <DType kIn>
cudaError_t LaunchAmax(const QuantizeProblem& p, const Quantize& q, cudaStream_t stream) {
  const int64_t stretches = OneForAll(p) ? 1 : p.rows, length = p.rows * p.columns / stretches;
  const cudaError_t cleared =
      cudaMemsetAsync(q.found, 0, static_cast<size_t>(stretches) * sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  constexpr int64_t kPerBlock = int64_t{kThreads} * kAmaxChunks * kValues<kIn>;
  const dim3 grid(GridSize(TileCount(length, kPerBlock)), GridSize(stretches));
  FindAmax<kIn><<<grid, kThreads, 0, stream>>>(q, length);
  return cudaGetLastError();
}

template <DType kIn, DType kOut>
cudaError_t LaunchAs(const QuantizeProblem& p, const Quantize& q, cudaStream_t stream) {
  if (RowsInRegisters(p)) return LaunchRows<kIn, kOut>(p, q, stream);
  cudaError_t status = cudaSuccess;
  if (q.found) status = LaunchAmax<kIn>(p, q, stream);
  if (q.raised) status = cudaMemsetAsync(q.raised, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  return LaunchTiles<kIn, kOut>(p, q, stream);
}

cudaError_t Dispatch(const QuantizeProblem& p, const Quantize& q, cudaStream_t stream) {
  return Visit<DType::kBF16, DType::kF16, DType::kF32>(
      p.in, cudaErrorInvalidValue, [&]<DType kIn>() {
        return Visit<DType::kE4M3, DType::kE5M2, DType::kS8>(
            p.out, cudaErrorInvalidValue,
            [&]<DType kOut>() { return LaunchAs<kIn, kOut>(p, q, stream); });
      });
}

// The second output of rows that stayed in registers: their codes, turned; or quantised once more
// where the rows of the second output are not 16-byte aligned.
std::string TurnCodes(const QuantizeProblem& p, const QuantizeBuffers& b, cudaStream_t stream) {
  if (p.rows % 16 == 0 && AlignmentOf(b.codes_transposed, {}) == 16) {
    PackRequest request;
    request.side.dtype = p.out, request.side.free = 1, request.side.depth = p.columns;
    request.lines.count = p.columns, request.lines.depth = p.rows;
    request.out = p.out, request.count_padded = p.columns, request.depth_padded = p.rows;
    return LaunchPack(request, b.codes, nullptr, nullptr, b.codes_transposed, stream);
  }
  QuantizeProblem again = p;
  again.given_scale = true, again.amax = false;
  Quantize q = MakeQuantize(again, b);
  q.codes = nullptr;
  return CudaError(Dispatch(again, q, stream), "quantising for the transposed output");
}

}  // namespace

std::string LaunchQuantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers,
                           cudaStream_t stream) {
  std::string wrong = QuantizeWhyNot(problem);
  if (!wrong.empty() || problem.rows * problem.columns == 0) return wrong;
  const Quantize q = MakeQuantize(problem, buffers);
  wrong = CudaError(Dispatch(problem, q, stream), "quantising");
  if (!wrong.empty() || !problem.transposed || !RowsInRegisters(problem)) return wrong;
  return TurnCodes(problem, buffers, stream);
}

}  // namespace jaxfp8::cuda
