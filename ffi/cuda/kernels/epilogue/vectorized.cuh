// The epilogue for the common layout, bound by memory. Columns are contiguous and come in aligned
// fours in every full matrix, and neither bias nor out_scale varies along the rows.
//
//   accumulators [rows, columns]            a group of 32 to 128 threads takes a row per pass
//     thread 0      thread 1     ...
//     4 columns     4 columns               registers of a thread: scale, bias, zero point of its
//     row 0  |      row 0  |                four columns (ColumnParams)
//     row s  |      row s  |                shared memory: RowParams of the block's rows
//     row 2s v      row 2s v                kRowsInFlight rows are loaded per pass (row_batch.cuh)
//
// There is one code path from load to load without branches: the loads of a batch are in flight
// together. Threads outside the slab read inside it and write nothing.

#pragma once

#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/epilogue/row_batch.cuh"

namespace jaxfp8::cuda {

// Blocks on a multiprocessor at a time, as many as registers allow.
template <bool kZero>
inline constexpr int kBlocksPerSm = kZero ? 5 : 6;

// Whether `VectorizedEpilogue` can compute the request.
inline bool FitsVectorized(const Epilogue& e, DType acc) {
  return e.columns % 4 == 0 && e.column % 4 == 0 && e.alignment >= 4 * SizeOf(acc) &&
         StrideFits(e.acc_row) && FitsRowBatch(e.elementwise);
}

#ifdef __CUDACC__

// The subtraction of zero points from int32 accumulators: there are none, or in 32 or 64 bits.
enum class ZeroPointMath { kNone, kInt32, kInt64 };

template <DType kAcc, ZeroPointMath kMath>
__device__ __forceinline__ void Dequantize(const uint4& bits, const RowParams& row,
                                           const ColumnParams& columns, int64_t depth,
                                           float (&y)[4]) {
  const uint32_t acc[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum;
    if constexpr (kMath == ZeroPointMath::kInt64) {
      sum = ToFloat(ZeroPointCorrected(acc[i], row, columns, i, depth));
    } else if constexpr (kMath == ZeroPointMath::kInt32) {
      sum = static_cast<float>(static_cast<int32_t>(acc[i]) - row.zero * columns.line_sum[i] -
                               columns.zero[i] * row.row_term);
    } else if constexpr (kAcc == DType::kS32) {
      sum = static_cast<float>(static_cast<int32_t>(acc[i]));
    } else {
      sum = FloatFromBits(acc[i]);
    }
    y[i] = sum * row.scale * columns.scale[i];
  }
}

template <DType kAcc, ZeroPointMath kMath>
__device__ __forceinline__ void DequantizeRows(const uint4 (&acc)[kRowsInFlight],
                                               const RowCursor& cursor, const RowParams* row_params,
                                               const ColumnParams& columns, int64_t depth,
                                               RowBatch& y) {
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    const RowParams params = row_params[cursor.At(j)];
    Dequantize<kAcc, kMath>(acc[j], params, columns, depth, y[j]);
  }
}

// The magnitude |value|, or 2^31 if it is larger.
__device__ __forceinline__ uint32_t Magnitude(int64_t value) {
  const uint64_t magnitude = static_cast<uint64_t>(value < 0 ? -value : value);
  return magnitude >> 31 ? 1u << 31 : static_cast<uint32_t>(magnitude);
}

// The largest |zero| and |row_term| of a block's rows, in shared memory.
struct RowMaxima {
  uint32_t zero, row_term;
};

// Whether every corrected accumulator, and every term of it, fits 32 bits. A product of two 8-bit
// values has 16 bits.
__device__ __forceinline__ bool FitsInt32(const RowMaxima& maxima, int64_t depth,
                                          const ColumnParams& columns) {
  uint32_t sum = 0, zero = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = max(sum, Magnitude(columns.line_sum[i])), zero = max(zero, Magnitude(columns.zero[i]));
  }
  const float products = 65536.0f * static_cast<float>(depth);
  return products + static_cast<float>(maxima.zero) * static_cast<float>(sum) +
             static_cast<float>(maxima.row_term) * static_cast<float>(zero) <
         0x1.ep30f;
}

// Loads a batch of accumulators. `start` is the offset of the block's first row and the thread's
// first column.
__device__ __forceinline__ void LoadBatch(const Epilogue& e, int64_t start, const RowCursor& cursor,
                                          uint4 (&acc)[kRowsInFlight]) {
  const uint32_t* from = static_cast<const uint32_t*>(e.acc) + start;
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    acc[j] = *reinterpret_cast<const uint4*>(from + cursor.At(j, e.acc_row));
  }
}

// Stores the parameters of a row in shared memory, and raises the maxima to its zero point.
template <bool kZero>
__device__ __forceinline__ void ShareRowParams(RowParams params, int64_t depth,
                                               RowParams* row_params, RowMaxima& maxima) {
  if constexpr (kZero) {
    const int64_t row_term = params.line_sum - depth * params.zero;
    params.row_term = static_cast<int32_t>(row_term);
    atomicMax(&maxima.zero, Magnitude(params.zero)),
        atomicMax(&maxima.row_term, Magnitude(row_term));
  }
  row_params[threadIdx.x] = params;
}

// The kernel.
//   kAcc       type of the accumulators: int32 or float32
//   kZero      there are zero points
//   log_group  2^log_group threads take a row: 32 to 128
//   deep       rows of a thread, a multiple of kRowsInFlight
template <DType kAcc, bool kZero>
__global__ void __launch_bounds__(kVectorThreads, kBlocksPerSm<kZero>)
    VectorizedEpilogue(const Epilogue e, int log_group, int deep) {
  __shared__ RowParams row_params[kMaxRowsPerBlock];
  __shared__ RowMaxima maxima;
  if (kZero && threadIdx.x == 0) maxima = RowMaxima{0, 0};
  const Elementwise& ew = e.elementwise;
  const int64_t local_b = blockIdx.z, b = e.batch + local_b;
  const int step = kVectorThreads >> log_group;  // rows per pass of a block
  const int line = static_cast<int>(threadIdx.x) >> log_group;
  const int64_t first_row = int64_t{blockIdx.y} * (step * deep);
  const int64_t unclamped =
      ((int64_t{blockIdx.x} << log_group) + (threadIdx.x & ((1 << log_group) - 1))) * 4;
  const bool inside = unclamped < e.columns;
  const int64_t c = inside ? unclamped : 0;
  const int rows = static_cast<int>(min(int64_t{step * deep}, e.rows - first_row));
  RowCursor cursor{b, e.row + first_row, e.column + c, line, step, rows - 1};
  const int64_t start = local_b * e.acc_batch + first_row * e.acc_row + c;
  uint4 acc[kRowsInFlight];
  LoadBatch(e, start, cursor, acc);
  static_assert(kMaxRowsPerBlock <= kVectorThreads);
  const bool has_row = threadIdx.x < rows;
  const int64_t r = first_row + (has_row ? threadIdx.x : 0);
  const RowParams params = LoadRowParams(e.lhs, local_b, b, r, e.row + r);
  ColumnParams columns;
  LoadColumnParams<kZero>(e, local_b, Quad{b, cursor.first_row, cursor.c, 4}, columns);
  if constexpr (kZero) __syncthreads();
  if (has_row) ShareRowParams<kZero>(params, e.depth, row_params, maxima);
  __syncthreads();
  const bool fits_int32 = kZero && FitsInt32(maxima, e.depth, columns);
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = kRowsInFlight;; i += kRowsInFlight) {
    const int left = cursor.row < rows ? (rows - cursor.row + step - 1) / step : 0;
    const int valid_rows = inside ? left : 0;
    RowBatch y;
    if constexpr (!kZero) {
      DequantizeRows<kAcc, ZeroPointMath::kNone>(acc, cursor, row_params, columns, e.depth, y);
    } else if (fits_int32) {
      DequantizeRows<kAcc, ZeroPointMath::kInt32>(acc, cursor, row_params, columns, e.depth, y);
    } else {
      DequantizeRows<kAcc, ZeroPointMath::kInt64>(acc, cursor, row_params, columns, e.depth, y);
    }
    // The next batch is loaded while this one is finished.
    RowCursor next = cursor;
    next.row += kRowsInFlight * step;
    if (i < deep) LoadBatch(e, start, next, acc);
    largest = max(largest, ApplyToBatch<32>(ew, cursor, valid_rows, columns.bias, y));
    if (i >= deep) break;
    cursor = next;
  }
  UpdateMatrixAmax(ew, b, largest);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
