// The epilogue of products with accumulators in memory: `VectorizedEpilogue` for
// the common layout, `GeneralEpilogue` here for every other.
//
//   GeneralEpilogue: a block of 8 warps takes 32 rows x 128 columns of the accumulators
//     warp w      rows w, w + 8, ...; a lane takes four columns
//     registers   ColumnParams of the lane's four columns
//     shared      RowParams of the 32 rows

#include <cfloat>

#include "common/sizes.h"
#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/row_batch.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {

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

// Blocks on a multiprocessor at a time, as many as registers allow.
template <bool kZero>
inline constexpr int kBlocksPerSm = kZero ? 5 : 6;

// Whether `VectorizedEpilogue` can compute the request.
inline bool FitsVectorized(const Epilogue& e, DType acc) {
  return e.columns % 4 == 0 && e.column % 4 == 0 && e.alignment >= 4 * SizeOf(acc) &&
         StrideFits(e.acc_row) && FitsRowBatch(e.elementwise);
}

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

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlockRows = 32, kBlockColumns = 128;  // of a block; a lane takes four columns

// The kernel for any layout. A warp takes 128 columns of every eighth row of a tile.
//   kAcc   type of the accumulators: int32 or float32
//   kZero  there are zero points
template <DType kAcc, bool kZero>
__global__ void __launch_bounds__(kThreads) GeneralEpilogue(const Epilogue e) {
  __shared__ RowParams row_params[kBlockRows];
  const uint32_t down = blockIdx.x / e.tiles_across;
  const int64_t local_b = down / e.tiles_down, b = e.batch + local_b;
  const int64_t first_column = int64_t{blockIdx.x % e.tiles_across} * kBlockColumns;
  const int64_t first_row = int64_t{down % e.tiles_down} * kBlockRows;
  const int rows = static_cast<int>(min(int64_t{kBlockRows}, e.rows - first_row));
  if (threadIdx.x < rows) {
    const int64_t r = first_row + threadIdx.x;
    row_params[threadIdx.x] = LoadRowParams(e.lhs, local_b, b, r, e.row + r);
  }
  const int lane = threadIdx.x % 32;
  const int64_t left = e.columns - first_column - 4 * lane;
  Quad q{b, 0, e.column + first_column + 4 * lane, static_cast<int>(max(min(left, 4l), 0l))};
  ColumnParams columns;
  LoadColumnParams<kZero>(e, local_b, q, columns);
  __syncthreads();
  const int64_t start = local_b * e.acc_batch + first_row * e.acc_row + first_column + 4 * lane;
  uint32_t largest = 0;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
    q.r = e.row + first_row + row;
    uint32_t seen = 0;
    if (q.count > 0) {
      uint32_t acc[4];
      LoadRun(static_cast<const uint32_t*>(e.acc) + start + row * e.acc_row, q.count, e.alignment,
              acc);
      seen = DequantizeAndStore<kAcc, kZero>(e, q, row_params[row], columns, acc);
    }
    largest = max(largest, seen);
    if (e.elementwise.amax_kind == AmaxKind::kPerRow) {
      seen = __reduce_max_sync(~0u, seen);
      if (lane == 0) atomicMax(e.elementwise.amax + e.elementwise.amax_plane.At(b, q.r, 0), seen);
    }
  }
  UpdateMatrixAmax(e.elementwise, b, largest);
}

SideParams MakeSideParams(const Side& side, const Correction& correction, const float* scale,
                          const int32_t* zero_point) {
  SideParams params{};
  const int64_t at = correction.depth / side.tiles.tile_depth * side.tiles.depth_stride;
  params.scale = correction.scale ? scale + at : nullptr;
  params.zero_point = correction.zero_point ? zero_point + at : nullptr;
  params.line_sums = correction.line_sums, params.line_sums_batch = correction.line_sums_batch;
  params.shift = correction.shift;
  params.tiles = side.tiles;
  return params;
}

bool HasZeroPoint(const Correction& c) { return c.zero_point || c.shift != 0; }

Status WhyNot(const Problem& problem, const EpilogueRequest& r) {
  const bool zeros = HasZeroPoint(r.lhs) || HasZeroPoint(r.rhs);
  if (zeros && r.slab.dtype != DType::kS32) return "epilogue: zero points need int32 accumulators";
  if ((HasZeroPoint(r.lhs) && !r.rhs.line_sums) || (HasZeroPoint(r.rhs) && !r.lhs.line_sums)) {
    return "epilogue: a zero point needs the line sums of the other side";
  }
  if (problem.out.dtype == DType::kS32 && r.slab.dtype != DType::kS32) {
    return "epilogue: an int32 output needs int32 accumulators";
  }
  return {};
}

Epilogue MakeEpilogue(const Problem& problem, const EpilogueRequest& r, const void* acc,
                      const Buffers& buffers) {
  Epilogue e{};
  e.acc = acc, e.depth = problem.depth;
  e.acc_batch = r.slab.batch_stride, e.acc_row = r.slab.row_stride;
  e.batch = r.slab.batch, e.row = r.slab.row, e.column = r.slab.column;
  e.rows = r.slab.rows, e.columns = r.slab.columns;
  e.lhs = MakeSideParams(problem.lhs, r.lhs, buffers.lhs_scale, buffers.lhs_zero_point);
  e.rhs = MakeSideParams(problem.rhs, r.rhs, buffers.rhs_scale, buffers.rhs_zero_point);
  const int64_t size = SizeOf(r.slab.dtype);
  e.alignment = AlignmentOf(acc, {e.acc_row * size, e.acc_batch * size, 4 * size});
  e.elementwise = MakeElementwise(problem, buffers);
  return e;
}

// Sets the tiles of the grid and returns its number of blocks, 0 if there are too many.
unsigned SetGrid(Epilogue& e, int64_t batches, int64_t rows, int64_t columns) {
  const int64_t across = DivideUp(e.columns, columns), down = DivideUp(e.rows, rows);
  if (across >> 31 || down >> 31 || (across * down) >> 31 || batches * across * down >> 31) {
    return 0;
  }
  e.tiles_across = static_cast<uint32_t>(across), e.tiles_down = static_cast<uint32_t>(down);
  return static_cast<unsigned>(batches * across * down);
}

// The number of blocks running at a time on the current device.
int64_t BlocksAtOnce(int blocks_per_sm) {
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess) {
    multiprocessors = 100;  // only the speed depends on it
  }
  return int64_t{multiprocessors} * blocks_per_sm;
}

// Rows of a thread. With 4096 x 8192 accumulators on an H200, 16 is as fast as 32 and 1.1x faster
// than 8.
constexpr int kRowsPerThread = 16;
constexpr int64_t kMaxGridY = 65535;

// Launches `VectorizedEpilogue` if it can compute the request; returns whether it did.
template <DType kAcc, bool kZero>
bool LaunchVectorized(const Epilogue& e, int64_t batches, cudaStream_t stream,
                      cudaError_t& status) {
  if (!FitsVectorized(e, kAcc) || batches > kMaxGridY) return false;
  int log_group = 5;
  while ((1 << log_group) < kVectorThreads && (4 << log_group) < e.columns) ++log_group;
  const int step = kVectorThreads >> log_group;
  const int64_t across = DivideUp(e.columns, 4 << log_group);
  const int64_t blocks_at_once = BlocksAtOnce(kBlocksPerSm<kZero>);
  int deep = kRowsPerThread;
  while (deep > kRowsInFlight && DivideUp(e.rows, step * deep) * across * batches < blocks_at_once)
    deep /= 2;
  while (deep < kMaxRowsPerThread && DivideUp(e.rows, step * deep) > kMaxGridY) deep *= 2;
  const int64_t down = DivideUp(e.rows, step * deep);
  if (down > kMaxGridY) return false;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down),
                  static_cast<unsigned>(batches));
  VectorizedEpilogue<kAcc, kZero><<<grid, kVectorThreads, 0, stream>>>(e, log_group, deep);
  status = cudaGetLastError();
  return true;
}

template <DType kAcc, bool kZero>
cudaError_t Launch(Epilogue e, int64_t batches, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  if (LaunchVectorized<kAcc, kZero>(e, batches, stream, status)) return status;
  const unsigned blocks = SetGrid(e, batches, kBlockRows, kBlockColumns);
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  GeneralEpilogue<kAcc, kZero><<<blocks, kThreads, 0, stream>>>(e);
  return cudaGetLastError();
}

__global__ void Reciprocal(const float* from, float* to) {
  const float x = *from, inverse = __frcp_rn(x);
  *to = isinf(inverse) && x != 0 ? copysignf(FLT_MAX, x) : inverse;
}

}  // namespace

Status LaunchReciprocal(const float* x, float* inverse, cudaStream_t stream) {
  Reciprocal<<<1, 1, 0, stream>>>(x, inverse);
  return CudaError(cudaGetLastError(), "launching `Reciprocal`");
}

Status LaunchEpilogue(const Problem& problem, const EpilogueRequest& request, const void* acc,
                      const Buffers& buffers, cudaStream_t stream) {
  JAXFP8_RETURN_IF_ERROR(WhyNot(problem, request));
  const Slab& slab = request.slab;
  if (slab.batches * slab.rows * slab.columns == 0) return {};
  const Epilogue e = MakeEpilogue(problem, request, acc, buffers);
  const bool zeros = HasZeroPoint(request.lhs) || HasZeroPoint(request.rhs);
  const cudaError_t status =
      Visit<DType::kS32, DType::kF32>(slab.dtype, cudaErrorInvalidValue, [&]<DType kAcc>() {
        if constexpr (kAcc == DType::kS32) {
          if (zeros) return Launch<kAcc, true>(e, slab.batches, stream);
        }
        return Launch<kAcc, false>(e, slab.batches, stream);
      });
  return CudaError(status, "the epilogue of a product");
}

Status ClearAmax(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  const Plane& amax = problem.amax;
  if (!amax) return {};
  const int64_t cells = (amax.batch_stride ? problem.batch : 1) *
                        (amax.row_stride ? problem.rows : 1) *
                        (amax.column_stride ? problem.columns : 1);
  if (cells == 0) return {};
  const cudaError_t status =
      cudaMemsetAsync(buffers.amax, 0, static_cast<size_t>(cells) * sizeof(float), stream);
  return CudaError(status, "clearing the amax");
}

}  // namespace jaxfp8::cuda
