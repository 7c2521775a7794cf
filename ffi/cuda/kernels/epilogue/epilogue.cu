// The epilogue of products with accumulators in memory: `VectorizedEpilogue` (vectorized.cuh) for
// the common layout, `GeneralEpilogue` here for every other.
//
//   GeneralEpilogue: a block of 8 warps takes 32 rows x 128 columns of the accumulators
//     warp w      rows w, w + 8, ...; a lane takes four columns
//     registers   ColumnParams of the lane's four columns
//     shared      RowParams of the 32 rows

#include <cfloat>

#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/quad.cuh"
#include "cuda/kernels/epilogue/vectorized.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
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

// ------------------------------------------------------------------------------------ launching

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

int64_t CeilDivide(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Sets the tiles of the grid and returns its number of blocks, 0 if there are too many.
unsigned SetGrid(Epilogue& e, int64_t batches, int64_t rows, int64_t columns) {
  const int64_t across = CeilDivide(e.columns, columns), down = CeilDivide(e.rows, rows);
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
  const int64_t across = CeilDivide(e.columns, 4 << log_group);
  const int64_t blocks_at_once = BlocksAtOnce(kBlocksPerSm<kZero>);
  int deep = kRowsPerThread;
  while (deep > kRowsInFlight &&
         CeilDivide(e.rows, step * deep) * across * batches < blocks_at_once)
    deep /= 2;
  while (deep < kMaxRowsPerThread && CeilDivide(e.rows, step * deep) > kMaxGridY) deep *= 2;
  const int64_t down = CeilDivide(e.rows, step * deep);
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
