// What the kernels of the epilogue know of a request, and what belongs to a row and to columns.

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_DEQUANTIZE_CUH_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_DEQUANTIZE_CUH_

#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"

namespace jaxfp8::cuda {

// What the sums lack of one side, by free index.
struct Fix {
  const float* scale;         // null: nothing; at the sums' depth
  const int32_t* zero_point;  // null: nothing; likewise
  const int32_t* sums;        // null: not needed
  int32_t shift;
  Tiles tiles;
  int64_t sums_batch;
};

struct Epilogue {
  const void* sums;
  int64_t sums_batch, sums_row;
  int alignment;
  int64_t batch, row, column, rows, columns;
  int64_t depth;
  uint32_t tiles_across, tiles_down;
  Fix lhs, rhs;
  Finish finish;
};

#ifdef __CUDACC__

struct alignas(16) Fixed {
  float scale;
  int32_t zero, sum;
  int32_t rest;  // sum - depth * zero, modulo 2^32
};

// `local` counts from the slab's beginning, f from the side's.
__device__ __forceinline__ Fixed Fetch(const Fix& fix, int64_t local_b, int64_t b, int64_t local,
                                       int64_t f) {
  Fixed fixed{1.0f, fix.shift, 0, 0};
  if (fix.scale || fix.zero_point) {
    const int64_t at = TileAt(fix.tiles, b, f, 0);
    if (fix.scale) fixed.scale = fix.scale[at];
    if (fix.zero_point) fixed.zero += fix.zero_point[at];
  }
  if (fix.sums) fixed.sum = fix.sums[local_b * fix.sums_batch + local];
  return fixed;
}

// What belongs to a thread's four columns.
struct Columns {
  float scale[4], bias[4];
  int32_t zero[4], sum[4];
};

// Where the tiles of four columns lie. Most tiles have size 1 or are one for all, which takes no
// division.
__device__ __forceinline__ void TilesOf(const Tiles& t, const Quad& q, int64_t (&at)[4]) {
  const int64_t start = q.b * t.batch_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = start + (q.c + i) * t.free_stride;
  if (t.tile_free == 1 || t.free_stride == 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i] = start + TileOf(q.c + i, t.tile_free) * t.free_stride;
}

// One load per column, without branches between them; wider ones behind a branch measured slower.
template <bool kZero>
__device__ __forceinline__ void FetchColumns(const Epilogue& e, int64_t local_b, const Quad& q,
                                             Columns& columns) {
  const Fix& fix = e.rhs;
  const Finish& f = e.finish;
  int64_t at[4];
  TilesOf(fix.tiles, q, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool there = i < q.count;
    columns.scale[i] = there && fix.scale ? fix.scale[at[i]] : 1.0f;
    if constexpr (kZero) {
      const int64_t local = local_b * fix.sums_batch + q.c + i - e.column;
      columns.zero[i] = fix.shift + (there && fix.zero_point ? fix.zero_point[at[i]] : 0);
      columns.sum[i] = there && fix.sums ? fix.sums[local] : 0;
    }
  }
  const bool biased = f.bias_plane && f.bias_plane.row == 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    columns.bias[i] = biased && i < q.count ? f.bias[f.bias_plane.At(q.b, 0, q.c + i)] : 0.0f;
  }
}

// sum - za * colsum - zb * (rowsum - depth * za). Exact: no bound on zero points and depths is
// known beforehand.
__device__ __forceinline__ int64_t TotalOf(uint32_t sum, const Fixed& row, const Columns& columns,
                                           int i, int64_t depth) {
  const int64_t rest = row.sum - depth * row.zero;
  return static_cast<int32_t>(sum) - int64_t{row.zero} * columns.sum[i] - columns.zero[i] * rest;
}

// Most totals fit 32 bits, whose conversion is four times as fast.
__device__ __forceinline__ float ToFloat(int64_t total) {
  const int32_t low = static_cast<int32_t>(total);
  return low == total ? static_cast<float>(low) : static_cast<float>(total);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_DEQUANTIZE_CUH_
