// The epilogue of products whose sums lie in memory: `RunEven` for the common layout, `RunAny` for
// every other.

#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/vectorized.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileRows = 32, kTileColumns = 128;  // four columns to a lane

template <DType kSums, bool kZero>
__device__ __forceinline__ uint32_t FinishRow(const Epilogue& e, const Quad& q, const Fixed& row,
                                              Columns& columns, const uint32_t (&sums)[4]) {
  const Finish& f = e.finish;
  float y[4];
  if constexpr (kSums == DType::kS32) {
    uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t total =
          kZero ? TotalOf(sums[i], row, columns, i, e.depth) : static_cast<int32_t>(sums[i]);
      low[i] = static_cast<uint32_t>(total);
      y[i] = ToFloat(total);
    }
    if (f.out_plane.dtype == DType::kS32) {
      StoreIntegers(f, q, low);
      return AmaxOf(f, q, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = FloatFromBits(sums[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = y[i] * row.scale * columns.scale[i];
  if (f.bias_plane && f.bias_plane.row != 0) LoadPlane(f.bias_plane, f.bias, q, 0.0f, columns.bias);
  float out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (f.out_scale_plane) LoadPlane(f.out_scale_plane, f.out_scale, q, 1.0f, out_scale);
  return FinishQuad(f, q, columns.bias, out_scale, y);
}

// The bits of four sums as int32 or float32; absent ones are 0.
template <DType kSums>
__device__ __forceinline__ void LoadSums(const Epilogue& e, int64_t at, int count,
                                         uint32_t (&sums)[4]) {
  const Bits<kSums>* from = static_cast<const Bits<kSums>*>(e.sums) + at;
  if constexpr (kSums == DType::kBF16) {
    uint32_t words[2];
    LoadRun(from, count, e.alignment, words);
    sums[0] = words[0] << 16, sums[1] = words[0] & 0xffff0000u;
    sums[2] = words[1] << 16, sums[3] = words[1] & 0xffff0000u;
  } else {
    LoadRun(from, count, e.alignment, sums);
  }
}

// A warp takes 128 columns of every eighth row of a tile.
template <DType kSums, bool kZero>
__global__ void __launch_bounds__(kThreads) RunAny(const Epilogue e) {
  __shared__ Fixed row_fixes[kTileRows];
  const uint32_t down = blockIdx.x / e.tiles_across;
  const int64_t local_b = down / e.tiles_down, b = e.batch + local_b;
  const int64_t first_column = int64_t{blockIdx.x % e.tiles_across} * kTileColumns;
  const int64_t first_row = int64_t{down % e.tiles_down} * kTileRows;
  const int rows = static_cast<int>(min(int64_t{kTileRows}, e.rows - first_row));
  if (threadIdx.x < rows) {
    const int64_t r = first_row + threadIdx.x;
    row_fixes[threadIdx.x] = Fetch(e.lhs, local_b, b, r, e.row + r);
  }
  const int lane = threadIdx.x % 32;
  const int64_t left = e.columns - first_column - 4 * lane;
  Quad q{b, 0, e.column + first_column + 4 * lane, static_cast<int>(max(min(left, 4l), 0l))};
  Columns columns;
  FetchColumns<kZero>(e, local_b, q, columns);
  __syncthreads();
  const int64_t start = local_b * e.sums_batch + first_row * e.sums_row + first_column + 4 * lane;
  uint32_t largest = 0;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
    q.r = e.row + first_row + row;
    uint32_t seen = 0;
    if (q.count > 0) {
      uint32_t sums[4];
      LoadSums<kSums>(e, start + row * e.sums_row, q.count, sums);
      seen = FinishRow<kSums, kZero>(e, q, row_fixes[row], columns, sums);
    }
    largest = max(largest, seen);
    if (e.finish.amax_kind == AmaxKind::kPerRow) {
      seen = __reduce_max_sync(~0u, seen);
      if (lane == 0) atomicMax(e.finish.amax + e.finish.amax_plane.At(b, q.r, 0), seen);
    }
  }
  RaiseOne(e.finish, b, largest);
}

// ------------------------------------------------------------------------------------ launching

Fix MakeFix(const Side& side, const Correction& correction, const float* scale,
            const int32_t* zero_point) {
  Fix fix{};
  const int64_t at = correction.depth / side.tiles.tile_depth * side.tiles.depth_stride;
  fix.scale = correction.scale ? scale + at : nullptr;
  fix.zero_point = correction.zero_point ? zero_point + at : nullptr;
  fix.sums = correction.sums, fix.shift = correction.shift;
  fix.tiles = side.tiles;
  return fix;
}

bool Shifts(const Correction& c) { return c.zero_point || c.shift != 0; }

std::string WhyNot(const Problem& problem, const EpilogueRequest& r) {
  const bool zeros = Shifts(r.lhs) || Shifts(r.rhs);
  if (zeros && r.slab.dtype != DType::kS32) return "epilogue: zero points need int32 sums";
  if ((Shifts(r.lhs) && !r.rhs.sums) || (Shifts(r.rhs) && !r.lhs.sums)) {
    return "epilogue: a zero point needs the sums of the other side's lines";
  }
  if (problem.out.dtype == DType::kS32 && r.slab.dtype != DType::kS32) {
    return "epilogue: an int32 output needs int32 sums";
  }
  return "";
}

Epilogue MakeEpilogue(const Problem& problem, const EpilogueRequest& r, const void* sums,
                      const Buffers& buffers) {
  Epilogue e{};
  e.sums = sums, e.depth = problem.depth;
  e.sums_batch = r.slab.batch_stride, e.sums_row = r.slab.row_stride;
  e.batch = r.slab.batch, e.row = r.slab.row, e.column = r.slab.column;
  e.rows = r.slab.rows, e.columns = r.slab.columns;
  e.lhs = MakeFix(problem.lhs, r.lhs, buffers.lhs_scale, buffers.lhs_zero_point);
  e.rhs = MakeFix(problem.rhs, r.rhs, buffers.rhs_scale, buffers.rhs_zero_point);
  e.lhs.sums_batch = e.rows, e.rhs.sums_batch = e.columns;
  const int64_t size = SizeOf(r.slab.dtype);
  e.alignment = AlignmentOf(sums, {e.sums_row * size, e.sums_batch * size, 4 * size});
  e.finish = MakeFinish(problem, buffers);
  return e;
}

int64_t CeilDivide(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Tiles of so many outputs; the blocks that makes, or 0 where that is more than a grid has.
unsigned Cut(Epilogue& e, int64_t batches, int64_t rows, int64_t columns) {
  const int64_t across = CeilDivide(e.columns, columns), down = CeilDivide(e.rows, rows);
  if (across >> 31 || down >> 31 || (across * down) >> 31 || batches * across * down >> 31) {
    return 0;
  }
  e.tiles_across = static_cast<uint32_t>(across), e.tiles_down = static_cast<uint32_t>(down);
  return static_cast<unsigned>(batches * across * down);
}

// How many blocks the current device holds, `resident` to a multiprocessor.
int64_t Slots(int resident) {
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess) {
    multiprocessors = 100;  // only the speed depends on it
  }
  return int64_t{multiprocessors} * resident;
}

// Rows to a thread, that pay for its beginning. Of 4096 x 8192 sums on an H200, 16 were as fast as
// 32 and up to a tenth faster than 8; blocks that stay for the whole matrix were slower.
constexpr int kUsualRows = 16;
constexpr int64_t kMostDown = 65535;  // of a grid

// Whether it was launched; `status` says how.
template <DType kSums, bool kZero>
bool LaunchEven(const Epilogue& e, int64_t batches, cudaStream_t stream, cudaError_t& status) {
  if (!Even(e, kSums) || batches > kMostDown) return false;
  int log_group = 5;
  while ((1 << log_group) < kEvenThreads && (4 << log_group) < e.columns) ++log_group;
  const int step = kEvenThreads >> log_group;
  const int64_t across = CeilDivide(e.columns, 4 << log_group);
  const int64_t slots = Slots(kResident<kZero>);
  int deep = kUsualRows;
  while (deep > kAhead && CeilDivide(e.rows, step * deep) * across * batches < slots) deep /= 2;
  while (deep < kMostRows && CeilDivide(e.rows, step * deep) > kMostDown) deep *= 2;
  const int64_t down = CeilDivide(e.rows, step * deep);
  if (down > kMostDown) return false;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down),
                  static_cast<unsigned>(batches));
  RunEven<kSums, kZero><<<grid, kEvenThreads, 0, stream>>>(e, log_group, deep);
  status = cudaGetLastError();
  return true;
}

template <DType kSums, bool kZero>
cudaError_t Launch(Epilogue e, int64_t batches, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  if (LaunchEven<kSums, kZero>(e, batches, stream, status)) return status;
  const unsigned blocks = Cut(e, batches, kTileRows, kTileColumns);
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  RunAny<kSums, kZero><<<blocks, kThreads, 0, stream>>>(e);
  return cudaGetLastError();
}

}  // namespace

std::string LaunchEpilogue(const Problem& problem, const EpilogueRequest& request, const void* sums,
                           const Buffers& buffers, cudaStream_t stream) {
  std::string wrong = WhyNot(problem, request);
  if (!wrong.empty()) return wrong;
  const Slab& slab = request.slab;
  if (slab.batches * slab.rows * slab.columns == 0) return "";
  const Epilogue e = MakeEpilogue(problem, request, sums, buffers);
  const bool zeros = Shifts(request.lhs) || Shifts(request.rhs);
  const cudaError_t status = Visit<DType::kS32, DType::kF32, DType::kBF16>(
      slab.dtype, cudaErrorInvalidValue, [&]<DType kSums>() {
        if constexpr (kSums == DType::kS32) {
          if (zeros) return Launch<kSums, true>(e, slab.batches, stream);
        }
        return Launch<kSums, false>(e, slab.batches, stream);
      });
  return CudaError(status, "the epilogue of a product");
}

std::string ClearAmax(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  const Plane& amax = problem.amax;
  if (!amax) return "";
  const int64_t cells = (amax.batch ? problem.batch : 1) * (amax.row ? problem.rows : 1) *
                        (amax.column ? problem.columns : 1);
  if (cells == 0) return "";
  const cudaError_t status =
      cudaMemsetAsync(buffers.amax, 0, static_cast<size_t>(cells) * sizeof(float), stream);
  return CudaError(status, "clearing the amax");
}

}  // namespace jaxfp8::cuda
