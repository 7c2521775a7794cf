// The elementwise epilogue of kRowsInFlight rows x 4 columns of a thread.
//
//   RowBatch y, in registers           global
//     row 0   y[0][0..3]   <----- residual, out_scale       every load of the batch comes before
//     row 1   y[1][0..3]          (4 columns a load)        the first use
//     ...                  -----> out, amax

#pragma once

#include "cuda/kernels/epilogue/elementwise.cuh"

namespace jaxfp8::cuda {

inline constexpr int kVectorThreads = 128;
inline constexpr int kRowsInFlight = 4;
inline constexpr int kMaxRowsPerThread = 32;
inline constexpr int kMaxRowsPerBlock = kVectorThreads / 32 * kMaxRowsPerThread;

// Whether offsets within the rows of a block fit 32 bits.
inline bool StrideFits(int64_t stride) {
  return stride >= 0 && stride < (1ll << 31) / kMaxRowsPerBlock;
}

inline bool IsVectorizable(const Plane& plane, int alignment) {
  return plane.column_stride == 1 && StrideFits(plane.row_stride) &&
         alignment >= 4 * SizeOf(plane.dtype);
}

// Whether `ApplyToBatch` can do the rest of the epilogue, if columns come in fours.
inline bool FitsRowBatch(const Elementwise& ew) {
  return ew.out_plane.dtype != DType::kS32 && IsVectorizable(ew.out_plane, ew.out_alignment) &&
         (!ew.residual_plane || IsVectorizable(ew.residual_plane, ew.residual_alignment)) &&
         (!ew.bias_plane || ew.bias_plane.row_stride == 0) &&
         (!ew.out_scale_plane || ew.out_scale_plane.row_stride == 0) &&
         ew.amax_kind != AmaxKind::kOther;
}

#ifdef __CUDACC__

// Four columns of kRowsInFlight rows.
using RowBatch = float[kRowsInFlight][4];

// The place of a batch in the output. Rows past the last are read as the last, and not written.
struct RowCursor {
  int64_t b, first_row, c;  // of the output
  int row, step, last;      // row of the batch, from row to row, last of the block: from first_row

  __device__ __forceinline__ int At(int j) const { return min(row + j * step, last); }
  __device__ __forceinline__ int At(int j, int64_t stride) const {
    return At(j) * static_cast<int>(stride);
  }
  __device__ __forceinline__ int64_t In(const Plane& plane) const {
    return plane.At(b, first_row, c);
  }
};

template <DType kType>
__device__ __forceinline__ void AddResidualRowsAs(const Elementwise& ew, const RowCursor& cursor,
                                                  RowBatch& y) {
  const Bits<kType>* from =
      static_cast<const Bits<kType>*>(ew.residual) + cursor.In(ew.residual_plane);
  uint32_t words[kRowsInFlight][SizeOf(kType)];
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    LoadWords(from + cursor.At(j, ew.residual_plane.row_stride), 4 * SizeOf(kType), words[j]);
  }
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    float values[4];
#pragma unroll
    for (int i = 0; i < SizeOf(kType); ++i) {
      DecodeWord<kType>(words[j][i], values + i * kPerWord<kType>);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[j][i] += values[i];
  }
}

__device__ __forceinline__ void AddResidualRows(const Elementwise& ew, const RowCursor& cursor,
                                                RowBatch& y) {
  if (ew.residual_plane.dtype == DType::kBF16) {
    AddResidualRowsAs<DType::kBF16>(ew, cursor, y);
  } else if (ew.residual_plane.dtype == DType::kF16) {
    AddResidualRowsAs<DType::kF16>(ew, cursor, y);
  } else {
    AddResidualRowsAs<DType::kF32>(ew, cursor, y);
  }
}

// Loads the divisors from L1 for each batch: kept, they would take four registers in every case.
__device__ __forceinline__ void DivideRows(const Elementwise& ew, const RowCursor& cursor,
                                           RowBatch& y) {
  float divisors[4];
  LoadPlane(ew.out_scale_plane, ew.out_scale, Quad{cursor.b, 0, cursor.c, 4}, 1.0f, divisors);
#pragma unroll
  for (int k = 0; k < 4 * kRowsInFlight; ++k) y[k / 4][k % 4] /= divisors[k % 4];
}

template <float (*kActivation)(float)>
__device__ __forceinline__ void ApplyToRows(RowBatch& y) {
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[j][i] = kActivation(y[j][i]);
  }
}

__device__ __forceinline__ void ApplyActivationRows(Activation activation, RowBatch& y) {
#define JAXFP8_APPLY(Name, text) \
  if (activation == Activation::k##Name) ApplyToRows<Name##F32>(y);
  JAXFP8_ACTIVATIONS(JAXFP8_APPLY)
#undef JAXFP8_APPLY
}

template <DType kOut>
__device__ __forceinline__ void StoreRowsAs(const Elementwise& ew, const RowCursor& cursor,
                                            int valid_rows, const RowBatch& y) {
  Bits<kOut>* to = static_cast<Bits<kOut>*>(ew.out) + cursor.In(ew.out_plane);
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    uint32_t words[SizeOf(kOut)];
#pragma unroll
    for (int i = 0; i < SizeOf(kOut); ++i) words[i] = EncodeWord<kOut>(y[j] + i * kPerWord<kOut>);
    if (j < valid_rows)
      StoreRun(to + cursor.At(j, ew.out_plane.row_stride), 4, 4 * SizeOf(kOut), words);
  }
}

__device__ __forceinline__ void StoreRows(const Elementwise& ew, const RowCursor& cursor,
                                          int valid_rows, const RowBatch& y) {
  WithType(ew.out_plane.dtype, [&]<DType kOut>() { StoreRowsAs<kOut>(ew, cursor, valid_rows, y); });
}

// The largest value of kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ uint32_t MaxOfLanes(uint32_t value) {
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(~0u, value);
  } else {
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      value = max(value, __shfl_xor_sync(~0u, value, lanes));
    }
    return value;
  }
}

// Returns the largest |y| of the first `valid_rows` rows, as bits. Raises the amax itself if it has
// a cell per row.
//   kLanes  lanes of a warp with the same rows
template <int kLanes>
__device__ __forceinline__ uint32_t AmaxOfRows(const Elementwise& ew, const RowCursor& cursor,
                                               int valid_rows, const RowBatch& y) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) seen = max(seen, MagnitudeBits(y[j][i]));
    seen = j < valid_rows ? AmaxBits(seen) : 0u;
    largest = max(largest, seen);
    if (ew.amax_kind != AmaxKind::kPerRow) continue;
    seen = MaxOfLanes<kLanes>(seen);
    if (threadIdx.x % kLanes == 0 && seen > 0) {
      atomicMax(ew.amax + ew.amax_plane.At(cursor.b, cursor.first_row + cursor.At(j), 0), seen);
    }
  }
  return largest;
}

// Applies the elementwise epilogue to a batch and stores it. Returns the largest |y|, as bits.
//   kLanes  as for `AmaxOfRows`
//   bias    of the four columns
template <int kLanes>
__device__ __forceinline__ uint32_t ApplyToBatch(const Elementwise& ew, const RowCursor& cursor,
                                                 int valid_rows, const float (&bias)[4],
                                                 RowBatch& y) {
  if (ew.residual_plane) AddResidualRows(ew, cursor, y);
  if (ew.bias_plane) {
#pragma unroll
    for (int k = 0; k < 4 * kRowsInFlight; ++k) y[k / 4][k % 4] += bias[k % 4];
  }
  if (ew.activation != Activation::kNone) ApplyActivationRows(ew.activation, y);
  uint32_t largest = 0;
  if (ew.amax_kind != AmaxKind::kNone) largest = AmaxOfRows<kLanes>(ew, cursor, valid_rows, y);
  if (ew.out_scale_plane) DivideRows(ew, cursor, y);
  StoreRows(ew, cursor, valid_rows, y);
  return largest;
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
