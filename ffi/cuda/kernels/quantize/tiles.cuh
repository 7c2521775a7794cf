// Quantizes 128 x 128 values a block, which stay in the block's registers.
//
//   x            a thread holds kRowsPerThread consecutive rows of 16 bytes
//   scales       of 1 x 128 or 128 x 128 tiles, computed here; or known, and then the block can
//                also raise the amax of the whole tensor
//   codes        stored from registers
//   transposed   the same codes, or those by scales of 128 x 1 tiles, through shared memory
//                (common/transpose.cuh), stored as [columns, rows]

#pragma once

#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/quantize/chunk.cuh"
#include "cuda/kernels/quantize/quantize.h"

namespace jaxfp8::cuda {

// Where scales come from: computed for 1 x 128 or 128 x 128 tiles, or known. With kBoth128 those of
// the transposed codes are computed for 128 x 1, those of the others for 1 x 128.
enum class ScaleTile { kRow128, kSquare128, kKnown, kBoth128 };

// A thread's part of the block's tile of x.
template <DType kIn, int kThreads = kQuantizeThreads>
struct Tile {
  static constexpr int kThreadsPerRow = kTransposeTile / kValues<kIn>;
  static constexpr int kRowsPerThread = kTransposeTile * kThreadsPerRow / kThreads;
  uint32_t words[kRowsPerThread][kWords];
};

// The largest finite magnitude of each row of a thread, the first of which is `r`.
template <DType kIn>
__device__ __forceinline__ void MaxOfThreadRows(const QuantizeArguments& q, const Tile<kIn>& tile,
                                                int64_t r, int64_t c,
                                                uint32_t (&largest)[Tile<kIn>::kRowsPerThread]) {
  uint32_t max_bits = 0;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kRowsPerThread; ++i) {
    largest[i] = MaxBits<kIn>(MaxMagnitudes<kIn>(tile.words[i], 0));
    max_bits = max(max_bits, largest[i]);
  }
  if (max_bits < kInfinityBits) return;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kRowsPerThread; ++i) {
    if (largest[i] < kInfinityBits) continue;
    largest[i] = MaxFiniteBits<kIn>(q.x, (r + i) * q.columns + c, q.columns - c);
  }
}

// The largest finite magnitude of the block's tile. The first row of this thread is `r`.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxOfBlock(const QuantizeArguments& q, const Tile<kIn>& tile,
                                               int64_t r, int64_t c, uint32_t* shared) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < Tile<kIn>::kRowsPerThread; ++i)
    packed = MaxMagnitudes<kIn>(tile.words[i], packed);
  uint32_t largest = MaxBits<kIn>(packed);
  if (largest >= kInfinityBits) {
    largest = 0;
    const int64_t end = min(r + Tile<kIn>::kRowsPerThread, q.rows);
#pragma unroll 1
    for (int64_t i = r; i < end; ++i) {
      largest = max(largest, MaxFiniteBits<kIn>(q.x, i * q.columns + c, q.columns - c));
    }
  }
  return MaxOfGroup(largest, kQuantizeThreads, shared);
}

// The maximum of each of kCount rows over kLanes neighbouring lanes, each of which holds a value of
// every row. A lane gets the result of row `RowOfLane`. Every exchange halves the rows of a lane.
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

// Where the values of a column of the block are in shared memory: neighbouring lanes, which hold
// neighbouring chunks of a row, have neighbouring words.
template <DType kIn>
__device__ __forceinline__ int ColumnWord(int chunk, int value) {
  return value * Tile<kIn>::kThreadsPerRow + chunk;
}

// Raises the maxima of the block's columns, as bits in shared memory, to finite magnitudes of this
// thread.
template <DType kIn>
__device__ __forceinline__ void RaiseColumns(const Tile<kIn>& tile, uint32_t* maxima) {
  uint32_t largest[kWords] = {};
#pragma unroll
  for (const auto& words : tile.words) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) largest[i] = MaxMagnitude<kIn>(largest[i], words[i]);
  }
  if (MaxBits<kIn>(MaxMagnitudes<kIn>(largest, 0)) >= kInfinityBits) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      largest[i] = 0;
#pragma unroll
      for (const auto& words : tile.words) {
        largest[i] = MaxMagnitude<kIn>(largest[i], FiniteMagnitudes<kIn>(words[i]));
      }
    }
  }
  const int chunk = threadIdx.x % Tile<kIn>::kThreadsPerRow;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    float values[kPerWord<kIn>];
    DecodeWord<kIn>(largest[i], values);
#pragma unroll
    for (int j = 0; j < kPerWord<kIn>; ++j) {
      atomicMax(maxima + ColumnWord<kIn>(chunk, i * kPerWord<kIn> + j), BitsOf(values[j]));
    }
  }
}

// Replaces the maxima of the block's columns by divisors, and stores the columns' scales.
template <DType kIn, DType kOut>
__device__ __forceinline__ void ScaleColumns(const QuantizeArguments& q, int64_t top, int64_t left,
                                             const uint32_t* maxima, FloatDivisor* divisors) {
  if (threadIdx.x >= kTransposeTile) return;
  const int c = threadIdx.x, at = ColumnWord<kIn>(c / kValues<kIn>, c % kValues<kIn>);
  const float scale = ScaleOf<kOut>(FloatFromBits(maxima[at]), q.power_of_two);
  divisors[at] = MakeFloatDivisor(scale);
  if (left + c >= q.columns) return;
  const int64_t tiles = (q.rows + kTransposeTile - 1) / kTransposeTile;
  q.transposed_scale[(left + c) * tiles + top / kTransposeTile] = scale;
}

// The known scale of a row: given, or computed from the amax of the pass before.
template <DType kOut>
__device__ __forceinline__ float KnownScale(const QuantizeArguments& q, int64_t row,
                                            int64_t column_tile) {
  const int64_t down = q.tile_rows == 1                ? row
                       : q.tile_rows == kTransposeTile ? row / kTransposeTile
                                                       : 0;
  const int64_t at = down * q.tiles_across + (q.tiles_across == 1 ? 0 : column_tile);
  if (!q.found_amax) return q.scale[at];
  const float amax = FloatFromBits(q.found_amax[at]);
  const float scale = ScaleOf<kOut>(amax, q.power_of_two);
  if (column_tile == 0 && (q.tile_rows == 1 || row == 0)) {
    q.scale[at] = scale;
    if (q.amax) q.amax[at] = amax;
  }
  return scale;
}

// The computed scale of a row. The thread that is `first` in the row stores it.
template <DType kOut, ScaleTile kScaleTile>
__device__ __forceinline__ float NewScale(const QuantizeArguments& q, int64_t row,
                                          int64_t column_tile, bool first, uint32_t largest) {
  constexpr bool kOfRow = kScaleTile != ScaleTile::kSquare128;
  const int64_t down = kOfRow ? row : row / kTransposeTile;
  const float amax = FloatFromBits(largest), scale = ScaleOf<kOut>(amax, q.power_of_two);
  if (first && (kOfRow || row % kTransposeTile == 0)) {
    q.scale[down * q.tiles_across + column_tile] = scale;
    if (q.amax) q.amax[down * q.tiles_across + column_tile] = amax;
  }
  return scale;
}

// Writes the codes of a tile to shared memory as words of four rows of a column.
template <int kRows, int kCodeWords>
__device__ __forceinline__ void StageTransposed(const uint32_t (&codes)[kRows][kCodeWords], int row,
                                                int column, uint32_t* stage) {
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
#pragma unroll
    for (int j = 0; j < kCodeWords; ++j) {
      uint32_t transposed[4];
      Transpose4x4Bytes(codes[i][j], codes[i + 1][j], codes[i + 2][j], codes[i + 3][j], transposed);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        stage[CodesSharedWord(column + 4 * j + k, (row + i) / 4)] = transposed[k];
    }
  }
}

// Stores a staged tile, whose first value is at (row, column) of [rows, columns], to `to`.
__device__ __forceinline__ void StoreTransposed(uint8_t* to, bool aligned, int64_t rows,
                                                int64_t columns, int64_t row, int64_t column,
                                                const uint32_t* stage) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kTransposeTile * kTransposeTile / 16; i += blockDim.x) {
    const int c = i / (kTransposeTile / 16), r = i % (kTransposeTile / 16) * 16;
    if (column + c >= columns || row + r >= rows) continue;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = stage[CodesSharedWord(c, r / 4 + j)];
    StoreCodes(to + (column + c) * rows + row + r, rows - row - r, aligned, words);
  }
}

// The kernel.
//   kIn         bfloat16, float16 or float32
//   kOut        e4m3, e5m2 or int8; not int8 with kBoth128
//   kScaleTile  where scales come from
template <DType kIn, DType kOut, ScaleTile kScaleTile>
__global__ void __launch_bounds__(kQuantizeThreads) QuantizeTiles(const QuantizeArguments q) {
  using T = Tile<kIn>;
  __shared__ uint32_t shared[32];
  __shared__ uint32_t stage[kTransposeTile * kTransposeTile / 4];
  const int64_t tiles_across = (q.columns + kTransposeTile - 1) / kTransposeTile;
  // After a pass over x, L2 still holds its end. So begin there.
  const int64_t index = kScaleTile == ScaleTile::kKnown ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t top = index / tiles_across * kTransposeTile, column_tile = index % tiles_across;
  const int row = threadIdx.x / T::kThreadsPerRow * T::kRowsPerThread;
  const int column = threadIdx.x % T::kThreadsPerRow * kValues<kIn>;
  const int64_t c = column_tile * kTransposeTile + column;
  T tile;
#pragma unroll
  for (int i = 0; i < T::kRowsPerThread; ++i) {
    const int64_t r = top + row + i;
    const bool in_bounds = r < q.rows && c < q.columns;
    LoadChunk<kIn>(q, in_bounds ? r * q.columns + c : 0, in_bounds ? q.columns - c : 0,
                   tile.words[i]);
  }
  __shared__ FloatDivisor divisors[kTransposeTile];
  // Of columns.
  constexpr int kColumns = kScaleTile == ScaleTile::kBoth128 ? kTransposeTile : 1;
  __shared__ uint32_t maxima[kColumns];
  __shared__ FloatDivisor column_divisors[kColumns];
  if constexpr (kScaleTile == ScaleTile::kBoth128) {
    if (threadIdx.x < kTransposeTile) maxima[threadIdx.x] = 0;
    __syncthreads();
    RaiseColumns<kIn>(tile, maxima);
    __syncthreads();
    ScaleColumns<kIn, kOut>(q, top, column_tile * kTransposeTile, maxima, column_divisors);
  }
  if constexpr (kScaleTile == ScaleTile::kKnown) {
    if (q.tensor_amax) UpdateAmax(q.tensor_amax, MaxOfBlock<kIn>(q, tile, top + row, c, shared));
    if (threadIdx.x < kTransposeTile && top + threadIdx.x < q.rows) {
      divisors[threadIdx.x] = MakeFloatDivisor(KnownScale<kOut>(q, top + threadIdx.x, column_tile));
    }
  } else {
    if constexpr (kScaleTile != ScaleTile::kSquare128) {
      uint32_t largest[T::kRowsPerThread];
      MaxOfThreadRows<kIn>(q, tile, top + row, c, largest);
      const uint32_t found_amax = MaxOfRows<T::kThreadsPerRow>(largest);
      const int r = row + RowOfLane<T::kRowsPerThread, T::kThreadsPerRow>();
      const bool first =
          threadIdx.x % (T::kThreadsPerRow / T::kRowsPerThread) == 0 && top + r < q.rows;
      const float scale = NewScale<kOut, kScaleTile>(q, top + r, column_tile, first, found_amax);
      divisors[r] = MakeFloatDivisor(scale);
    } else {
      const uint32_t found_amax = MaxOfBlock<kIn>(q, tile, top + row, c, shared);
      if (threadIdx.x < kTransposeTile) {
        const bool first = threadIdx.x == 0;
        divisors[threadIdx.x] =
            MakeFloatDivisor(NewScale<kOut, kScaleTile>(q, top, column_tile, first, found_amax));
      }
    }
  }
  __syncthreads();
  uint32_t codes[T::kRowsPerThread][kValues<kIn> / 4];
#pragma unroll
  for (int i = 0; i < T::kRowsPerThread; ++i) {
    ToCodes<kIn, kOut>(tile.words[i], divisors[row + i], codes[i]);
    const int64_t r = top + row + i;
    if (q.codes && r < q.rows && c < q.columns) {
      StoreCodes(q.codes + r * q.columns + c, q.columns - c, q.codes_aligned, codes[i]);
    }
  }
  if (!q.transposed) return;
  if constexpr (kScaleTile == ScaleTile::kBoth128) {
    const auto divide = [&](float value, int i) {
      return Quotient(value, column_divisors[ColumnWord<kIn>(column / kValues<kIn>, i)]);
    };
#pragma unroll
    for (int i = 0; i < T::kRowsPerThread; ++i) {
      DivideEach<kIn, kOut>(tile.words[i], divide, codes[i]);
    }
  }
  StageTransposed(codes, row, column, stage);
  __syncthreads();
  StoreTransposed(q.transposed, q.transposed_aligned, q.rows, q.columns, top,
                  column_tile * kTransposeTile, stage);
}

}  // namespace jaxfp8::cuda
