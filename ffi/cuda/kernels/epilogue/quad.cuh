// The whole epilogue of four consecutive columns of a row, for any layout of the output.

#pragma once

#include "cuda/kernels/epilogue/dequantize.cuh"

namespace jaxfp8::cuda {

#ifdef __CUDACC__

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
