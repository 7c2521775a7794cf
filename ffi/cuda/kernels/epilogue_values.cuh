// What the kernels of the epilogue know of a request, and what belongs to a row and to columns.

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_VALUES_CUH_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_VALUES_CUH_

#include "cuda/kernels/finish.cuh"
#include "cuda/kernels/tile_at.cuh"

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
};

// `local` counts from the slab's beginning, f from the side's.
__device__ __forceinline__ Fixed Fetch(const Fix& fix, int64_t local_b, int64_t b, int64_t local,
                                       int64_t f) {
  Fixed fixed{1.0f, fix.shift, 0};
  if (fix.scale || fix.zero_point) {
    const int64_t at = TileAt(fix.tiles, b, f, 0);
    if (fix.scale) fixed.scale = fix.scale[at];
    if (fix.zero_point) fixed.zero += fix.zero_point[at];
  }
  if (fix.sums) fixed.sum = fix.sums[local_b * fix.sums_batch + local];
  return fixed;
}

// What belongs to a thread's four columns. `rest` is colsum - depth * zero, so that
// total = sum - za * rest - zb * rowsum.
struct Columns {
  float scale[4], bias[4];
  int32_t zero[4];
  int64_t rest[4];
};

template <bool kZero>
__device__ __forceinline__ void FetchColumns(const Epilogue& e, int64_t local_b, const Quad& q,
                                             Columns& columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool there = i < q.count;
    const Fixed fixed =
        there ? Fetch(e.rhs, local_b, q.b, q.c + i - e.column, q.c + i) : Fixed{1.0f, 0, 0};
    columns.scale[i] = fixed.scale;
    columns.zero[i] = fixed.zero;
    columns.rest[i] = kZero ? fixed.sum - e.depth * fixed.zero : 0;
    columns.bias[i] = 0.0f;
  }
  const Finish& f = e.finish;
  if (f.bias_plane && f.bias_plane.row == 0) LoadPlane(f.bias_plane, f.bias, q, 0.0f, columns.bias);
}

// Exact: zero points and depths are the caller's, and no bound on them is known.
__device__ __forceinline__ int64_t TotalOf(uint32_t sum, const Fixed& row, const Columns& columns,
                                           int i) {
  return static_cast<int32_t>(sum) - row.zero * columns.rest[i] -
         int64_t{columns.zero[i]} * row.sum;
}

// Most totals fit 32 bits, whose conversion is four times as fast.
__device__ __forceinline__ float ToFloat(int64_t total) {
  const int32_t low = static_cast<int32_t>(total);
  return low == total ? static_cast<float>(low) : static_cast<float>(total);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_VALUES_CUH_
