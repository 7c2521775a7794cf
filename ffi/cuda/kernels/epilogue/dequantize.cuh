// Scales and zero points in the epilogue: the arguments of its kernels, the parameters of a row and
// of four columns, and the whole epilogue of four columns of a row, for any layout of the output.

#pragma once

#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"

namespace jaxfp8::cuda {

// Scales, zero points and line sums of one side, by free index. Null if not applied.
struct SideParams {
  const float* scale;         // from the accumulators' depth on
  const int32_t* zero_point;  // likewise
  const int32_t* line_sums;
  int32_t shift;
  Tiles tiles;
  int64_t line_sums_batch;
};

// The arguments of both kernels. Strides are in elements.
struct Epilogue {
  const void* acc;
  int64_t acc_batch, acc_row;
  int alignment;
  int64_t batch, row, column, rows, columns;
  int64_t depth;
  uint32_t tiles_across, tiles_down;
  SideParams lhs, rhs;
  Elementwise elementwise;
};

#ifdef __CUDACC__

struct alignas(16) RowParams {
  float scale;
  int32_t zero, line_sum;
  int32_t row_term;  // line_sum - depth * zero, modulo 2^32
};

// The parameters of a row.
//   local_b, local  batch index and free index, counted from the slab's beginning
//   b, f            the same, counted from the side's beginning
__device__ __forceinline__ RowParams LoadRowParams(const SideParams& side, int64_t local_b,
                                                   int64_t b, int64_t local, int64_t f) {
  RowParams params{1.0f, side.shift, 0, 0};
  if (side.scale || side.zero_point) {
    const int64_t at = TileAt(side.tiles, b, f, 0);
    if (side.scale) params.scale = side.scale[at];
    if (side.zero_point) params.zero += side.zero_point[at];
  }
  if (side.line_sums) params.line_sum = side.line_sums[local_b * side.line_sums_batch + local];
  return params;
}

// The parameters of a thread's four columns.
struct ColumnParams {
  float scale[4], bias[4];
  int32_t zero[4], line_sum[4];
};

// The indices of the tiles of four columns. Most tiles have size 1 or span the axis, and need no
// division.
__device__ __forceinline__ void TileIndices(const Tiles& t, const Quad& q, int64_t (&at)[4]) {
  const int64_t start = q.b * t.batch_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = start + (q.c + i) * t.free_stride;
  if (t.tile_free == 1 || t.free_stride == 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = start + TileOf(q.c + i, t.tile_free) * t.free_stride;
}

// Loads one value per column without branches. Wider loads behind a branch measured slower.
template <bool kZero>
__device__ __forceinline__ void LoadColumnParams(const Epilogue& e, int64_t local_b, const Quad& q,
                                                 ColumnParams& columns) {
  const SideParams& side = e.rhs;
  const Elementwise& ew = e.elementwise;
  int64_t at[4];
  TileIndices(side.tiles, q, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool in_bounds = i < q.count;
    columns.scale[i] = in_bounds && side.scale ? side.scale[at[i]] : 1.0f;
    if constexpr (kZero) {
      const int64_t local = local_b * side.line_sums_batch + q.c + i - e.column;
      columns.zero[i] = side.shift + (in_bounds && side.zero_point ? side.zero_point[at[i]] : 0);
      columns.line_sum[i] = in_bounds && side.line_sums ? side.line_sums[local] : 0;
    }
  }
  const bool biased = ew.bias_plane && ew.bias_plane.row_stride == 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    columns.bias[i] = biased && i < q.count ? ew.bias[ew.bias_plane.At(q.b, 0, q.c + i)] : 0.0f;
  }
}

// acc - za * colsum - zb * (rowsum - depth * za), exactly, whatever the zero points and the depth.
__device__ __forceinline__ int64_t ZeroPointCorrected(uint32_t sum, const RowParams& row,
                                                      const ColumnParams& columns, int i,
                                                      int64_t depth) {
  const int64_t row_term = row.line_sum - depth * row.zero;
  return static_cast<int32_t>(sum) - int64_t{row.zero} * columns.line_sum[i] -
         columns.zero[i] * row_term;
}

// Most values fit 32 bits: these convert 4x faster.
__device__ __forceinline__ float ToFloat(int64_t total) {
  const int32_t low = static_cast<int32_t>(total);
  return low == total ? static_cast<float>(low) : static_cast<float>(total);
}

// Dequantizes four accumulators, applies the elementwise epilogue and stores them; returns the
// largest |y| as bits.
//   kAcc     type of the accumulators: int32 or float32
//   kZero    there are zero points
//   columns  its bias is overwritten if the bias varies along the rows
//   acc      bits of int32 or float32
template <DType kAcc, bool kZero>
__device__ __forceinline__ uint32_t DequantizeAndStore(const Epilogue& e, const Quad& q,
                                                       const RowParams& row, ColumnParams& columns,
                                                       const uint32_t (&acc)[4]) {
  const Elementwise& ew = e.elementwise;
  float y[4];
  if constexpr (kAcc == DType::kS32) {
    uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t total = kZero ? ZeroPointCorrected(acc[i], row, columns, i, e.depth)
                                  : static_cast<int32_t>(acc[i]);
      low[i] = static_cast<uint32_t>(total);
      y[i] = ToFloat(total);
    }
    if (ew.out_plane.dtype == DType::kS32) {
      StoreIntegers(ew, q, low);
      return AmaxOf(ew, q, y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = FloatFromBits(acc[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = y[i] * row.scale * columns.scale[i];
  if (ew.bias_plane && ew.bias_plane.row_stride != 0)
    LoadPlane(ew.bias_plane, ew.bias, q, 0.0f, columns.bias);
  float out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (ew.out_scale_plane) LoadPlane(ew.out_scale_plane, ew.out_scale, q, 1.0f, out_scale);
  return ApplyElementwise(ew, q, columns.bias, out_scale, y);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
