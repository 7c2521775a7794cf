// The epilogue of products whose sums lie in memory. Bound by memory: a thread takes four columns
// of 16 rows, so that a warp reads 512 bytes of sums and writes 256 bytes of bfloat16 at a time,
// and keeps what belongs to its columns in registers.

#include <utility>

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/epilogue.h"
#include "cuda/kernels/finish.cuh"
#include "cuda/kernels/vector.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileColumns = 128;  // four to a lane
constexpr int kAhead = 4;          // rows whose sums are loaded together; set before measurement

// A tile of turned sums is brought through shared memory and therefore lower.
constexpr int RowsOf(bool turned) { return turned ? 32 : 128; }

// What the sums lack of one side, by free index.
struct Fix {
  const float* scale;         // null: nothing
  const int32_t* zero_point;  // null: nothing
  const int32_t* sums;        // null: not needed
  int32_t shift;
  Tiles tiles;
  int64_t depth;
  int64_t sums_batch;
};

struct Epilogue {
  const void* sums;
  int64_t sums_batch, sums_row, sums_column;
  int alignment;
  int64_t batch, row, column, rows, columns;
  int64_t depth;
  int64_t tiles_across, tiles_down;
  Fix lhs, rhs;
  Finish finish;
};

struct Fixed {
  float scale;
  int32_t zero, sum;
};

// 64-bit division takes a hundred instructions, and most tiles have size 1.
__device__ __forceinline__ int64_t TileOf(int64_t f, int64_t size) {
  if (size == 1) return f;
  if (((f | size) >> 32) == 0) return static_cast<uint32_t>(f) / static_cast<uint32_t>(size);
  return f / size;
}

// `local` counts from the slab's beginning, f from the side's.
__device__ __forceinline__ Fixed Fetch(const Fix& fix, int64_t local_b, int64_t b, int64_t local,
                                       int64_t f) {
  Fixed fixed{1.0f, fix.shift, 0};
  if (fix.scale || fix.zero_point) {
    const Tiles& t = fix.tiles;
    int64_t at = b * t.batch_stride;
    if (t.free_stride != 0) at += TileOf(f, t.tile_free) * t.free_stride;
    if (t.depth_stride != 0) at += fix.depth / t.tile_depth * t.depth_stride;
    if (fix.scale) fixed.scale = fix.scale[at];
    if (fix.zero_point) fixed.zero += fix.zero_point[at];
  }
  if (fix.sums) fixed.sum = fix.sums[local_b * fix.sums_batch + local];
  return fixed;
}

// What belongs to a thread's four columns. `rest` is colsum - depth * zero, so that
// total = sum - za * rest - zb * rowsum.
struct Columns {
  float scale[4], bias[4], out_scale[4];
  int32_t zero[4];
  int64_t rest[4];
};

__device__ __forceinline__ void FetchColumns(const Epilogue& e, int64_t local_b, const Quad& q,
                                             Columns& columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool there = i < q.count;
    const Fixed fixed =
        there ? Fetch(e.rhs, local_b, q.b, q.c + i - e.column, q.c + i) : Fixed{1.0f, 0, 0};
    columns.scale[i] = fixed.scale;
    columns.zero[i] = fixed.zero;
    columns.rest[i] = fixed.sum - e.depth * fixed.zero;
    columns.bias[i] = 0.0f, columns.out_scale[i] = 1.0f;
  }
  const Finish& f = e.finish;
  if (f.bias_plane && f.bias_plane.row == 0) LoadPlane(f.bias_plane, f.bias, q, 0.0f, columns.bias);
  if (f.out_scale_plane && f.out_scale_plane.row == 0) {
    LoadPlane(f.out_scale_plane, f.out_scale, q, 1.0f, columns.out_scale);
  }
}

// Most totals fit 32 bits, whose conversion is four times as fast.
__device__ __forceinline__ float ToFloat(int64_t total) {
  const int32_t low = static_cast<int32_t>(total);
  return low == total ? static_cast<float>(low) : static_cast<float>(total);
}

template <DType kSums, bool kZero>
__device__ __forceinline__ uint32_t FinishRow(const Epilogue& e, const Quad& q, const Fixed& row,
                                              Columns& columns, const uint32_t (&sums)[4]) {
  const Finish& f = e.finish;
  float y[4];
  if constexpr (kSums == DType::kS32) {
    int64_t totals[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      totals[i] = static_cast<int32_t>(sums[i]);
      if (kZero) {
        totals[i] -= row.zero * columns.rest[i];
        totals[i] -= int64_t{columns.zero[i]} * row.sum;
      }
      y[i] = kZero ? ToFloat(totals[i]) : static_cast<float>(static_cast<int32_t>(sums[i]));
    }
    if (f.out_plane.dtype == DType::kS32) {
      const uint32_t low[4] = {static_cast<uint32_t>(totals[0]), static_cast<uint32_t>(totals[1]),
                               static_cast<uint32_t>(totals[2]), static_cast<uint32_t>(totals[3])};
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
  if (f.out_scale_plane && f.out_scale_plane.row != 0) {
    LoadPlane(f.out_scale_plane, f.out_scale, q, 1.0f, columns.out_scale);
  }
  return FinishQuad(f, q, columns.bias, columns.out_scale, y);
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

// In shared memory each column's 32 rows are rotated by a quarter of the column: neither a warp
// that writes 32 rows of a column nor one that reads 4 columns per lane of a row meets in a bank.
JAXFP8_HD int TurnedCell(int row, int column) { return column * 32 + ((row + column / 4) & 31); }

template <DType kSums>
__device__ __forceinline__ void StageTurned(const Epilogue& e, int64_t start, int rows,
                                            int64_t columns, uint32_t* stage) {
  const Bits<kSums>* from = static_cast<const Bits<kSums>*>(e.sums) + start;
  const int row = threadIdx.x % 32;
#pragma unroll
  for (int column = threadIdx.x / 32; column < kTileColumns; column += kWarps) {
    const bool there = row < rows && column < columns;
    const uint32_t bits = there ? from[column * e.sums_column + row] : 0;
    stage[TurnedCell(row, column)] = kSums == DType::kBF16 ? bits << 16 : bits;
  }
}

template <DType kSums, bool kZero, bool kTurned>
__global__ void __launch_bounds__(kThreads) RunEpilogue(const Epilogue e) {
  constexpr int kRows = RowsOf(kTurned);
  __shared__ Fixed row_fixes[kRows];
  __shared__ uint32_t stage[kTurned ? 32 * kTileColumns : 1];
  const int64_t tile = blockIdx.x;
  const int64_t local_b = tile / (e.tiles_across * e.tiles_down), b = e.batch + local_b;
  const int64_t first_column = tile % e.tiles_across * kTileColumns;
  const int64_t first_row = tile / e.tiles_across % e.tiles_down * kRows;
  const int rows = static_cast<int>(min(int64_t{kRows}, e.rows - first_row));
  const int64_t start =
      local_b * e.sums_batch + first_row * e.sums_row + first_column * e.sums_column;
  if (threadIdx.x < rows) {
    const int64_t r = first_row + threadIdx.x;
    row_fixes[threadIdx.x] = Fetch(e.lhs, local_b, b, r, e.row + r);
  }
  if constexpr (kTurned) {
    StageTurned<kSums>(e, start, rows, e.columns - first_column, stage);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t left = e.columns - first_column - 4 * lane;
  Quad q{b, 0, e.column + first_column + 4 * lane, static_cast<int>(max(min(left, 4l), 0l))};
  Columns columns;
  FetchColumns(e, local_b, q, columns);
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = warp; i < rows; i += kWarps * kAhead) {
    uint32_t sums[kAhead][4];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int row = i + j * kWarps;
      if constexpr (kTurned) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[j][k] = stage[TurnedCell(row % 32, 4 * lane + k)];
      } else {
        LoadSums<kSums>(e, row < rows ? start + row * e.sums_row + 4 * lane : start,
                        row < rows ? q.count : 0, sums[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int row = i + j * kWarps;
      if (row >= rows) break;
      q.r = e.row + first_row + row;
      uint32_t seen = 0;
      if (q.count > 0) seen = FinishRow<kSums, kZero>(e, q, row_fixes[row], columns, sums[j]);
      largest = max(largest, seen);
      if (e.finish.amax_kind == AmaxKind::kPerRow) {
        seen = __reduce_max_sync(~0u, seen);
        if (lane == 0) atomicMax(e.finish.amax + e.finish.amax_plane.At(b, q.r, 0), seen);
      }
    }
  }
  RaiseOne(e.finish, b, largest);
}

template <DType kSums>
__global__ void __launch_bounds__(kThreads)
    RunAccumulate(const Epilogue e, bool first, float* totals) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t r = index / e.columns, c = index % e.columns, local_b = blockIdx.y;
  if (r >= e.rows) return;
  const int64_t at = local_b * e.sums_batch + r * e.sums_row + c;
  const float sum = Decode<kSums>(static_cast<const Bits<kSums>*>(e.sums)[at]);
  const float lhs = Fetch(e.lhs, local_b, e.batch + local_b, r, e.row + r).scale;
  const float rhs = Fetch(e.rhs, local_b, e.batch + local_b, c, e.column + c).scale;
  totals[at] = fmaf(sum * lhs, rhs, first ? 0.0f : totals[at]);
}

Fix MakeFix(const Side& side, const Correction& correction, const float* scale,
            const int32_t* zero_point) {
  Fix fix{};
  fix.scale = correction.scale ? scale : nullptr;
  fix.zero_point = correction.zero_point ? zero_point : nullptr;
  fix.sums = correction.sums, fix.shift = correction.shift;
  fix.tiles = side.tiles, fix.depth = correction.depth;
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
  e.sums_batch = r.slab.batch_stride, e.sums_row = r.slab.row_stride, e.sums_column = 1;
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

// Rows become columns; the sums are then turned.
void Turn(Epilogue& e) {
  std::swap(e.sums_row, e.sums_column);
  std::swap(e.row, e.column), std::swap(e.rows, e.columns), std::swap(e.lhs, e.rhs);
  Finish& f = e.finish;
  for (Plane* plane :
       {&f.residual_plane, &f.bias_plane, &f.out_scale_plane, &f.amax_plane, &f.out_plane}) {
    std::swap(plane->row, plane->column);
  }
  f.amax_kind = AmaxKindOf(f.amax_plane);
  f.residual_alignment = AlignmentOfPlane(f.residual_plane, f.residual);
  f.out_alignment = AlignmentOfPlane(f.out_plane, f.out);
}

template <DType kSums, bool kZero>
cudaError_t Launch(Epilogue e, int64_t batches, cudaStream_t stream) {
  const bool turned = e.sums_column != 1;
  const int64_t tile_rows = RowsOf(turned);
  e.tiles_across = (e.columns + kTileColumns - 1) / kTileColumns;
  e.tiles_down = (e.rows + tile_rows - 1) / tile_rows;
  const int64_t blocks = batches * e.tiles_across * e.tiles_down;
  if (blocks >> 31) return cudaErrorInvalidConfiguration;
  if (turned) {
    RunEpilogue<kSums, kZero, true><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(e);
  } else {
    RunEpilogue<kSums, kZero, false><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(e);
  }
  return cudaGetLastError();
}

}  // namespace

std::string LaunchEpilogue(const Problem& problem, const EpilogueRequest& request, const void* sums,
                           const Buffers& buffers, cudaStream_t stream) {
  std::string wrong = WhyNot(problem, request);
  if (!wrong.empty()) return wrong;
  const Slab& slab = request.slab;
  if (slab.batches * slab.rows * slab.columns == 0) return "";
  Epilogue e = MakeEpilogue(problem, request, sums, buffers);
  if (problem.out.column != 1 && problem.out.row == 1 && slab.rows > 1) Turn(e);
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

std::string LaunchAccumulate(const Problem& problem, const EpilogueRequest& request,
                             const void* sums, const Buffers& buffers, bool first, float* totals,
                             cudaStream_t stream) {
  if (Shifts(request.lhs) || Shifts(request.rhs)) {
    return "epilogue: products cut along the depth have no zero points";
  }
  const Slab& slab = request.slab;
  const int64_t values = slab.rows * slab.columns;
  if (slab.batches * values == 0) return "";
  const Epilogue e = MakeEpilogue(problem, request, sums, buffers);
  const dim3 grid(static_cast<unsigned>((values + kThreads - 1) / kThreads),
                  static_cast<unsigned>(slab.batches));
  const cudaError_t status = Visit<DType::kS32, DType::kF32, DType::kBF16>(
      slab.dtype, cudaErrorInvalidValue, [&]<DType kSums>() {
        RunAccumulate<kSums><<<grid, kThreads, 0, stream>>>(e, first, totals);
        return cudaGetLastError();
      });
  return CudaError(status, "adding up a product");
}

}  // namespace jaxfp8::cuda
