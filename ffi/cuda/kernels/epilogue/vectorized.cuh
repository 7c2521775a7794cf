// The epilogue of the common layout, at the speed of memory: columns are contiguous in every full
// matrix and come in aligned fours, and no bias or out_scale varies along the rows.
//
// A thread walks down four columns, whose values it keeps. It takes `kAhead` rows at a time, all of
// their loads before anything else: with one path per load through the code, and nothing between
// them, they are in flight together. Threads outside the slab read inside it and write nothing.

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_VECTORIZED_CUH_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_VECTORIZED_CUH_

#include "cuda/kernels/epilogue/dequantize.cuh"

namespace jaxfp8::cuda {

inline constexpr int kEvenThreads = 128;
inline constexpr int kAhead = 4;
inline constexpr int kMostRows = 32;  // to a thread
inline constexpr int kBlockRows = kEvenThreads / 32 * kMostRows;

// Blocks to a multiprocessor; what the registers allow.
template <bool kZero>
inline constexpr int kResident = kZero ? 5 : 6;

// Offsets within a block's rows are 32 bits wide.
inline bool RowsFit(int64_t stride) { return stride >= 0 && stride < (1ll << 31) / kBlockRows; }

inline bool InFours(const Plane& plane, int alignment) {
  return plane.column == 1 && RowsFit(plane.row) && alignment >= 4 * SizeOf(plane.dtype);
}

// Whether `RunEven` can do it.
inline bool Even(const Epilogue& e, DType sums) {
  const Finish& f = e.finish;
  return e.columns % 4 == 0 && e.column % 4 == 0 && e.alignment >= 4 * SizeOf(sums) &&
         RowsFit(e.sums_row) && f.out_plane.dtype != DType::kS32 &&
         InFours(f.out_plane, f.out_alignment) &&
         (!f.residual_plane || InFours(f.residual_plane, f.residual_alignment)) &&
         (!f.bias_plane || f.bias_plane.row == 0) &&
         (!f.out_scale_plane || f.out_scale_plane.row == 0) && f.amax_kind != AmaxKind::kOther;
}

#ifdef __CUDACC__

// A batch of rows of four values each, and where they lie; rows past the last stand for it.
using Rows = float[kAhead][4];

struct Place {
  int64_t b, first_row, c;  // of the output
  int row, step, last;      // from first_row

  __device__ __forceinline__ int At(int j) const { return min(row + j * step, last); }
  __device__ __forceinline__ int At(int j, int64_t stride) const {
    return At(j) * static_cast<int>(stride);
  }
  __device__ __forceinline__ int64_t In(const Plane& plane) const {
    return plane.At(b, first_row, c);
  }
};

// Four sums as bits, of float32 or int32.
template <DType kSums>
__device__ __forceinline__ uint4 LoadFour(const void* sums, int64_t at) {
  if constexpr (kSums == DType::kBF16) {
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(sums) + at);
    return make_uint4(v.x << 16, v.x & 0xffff0000u, v.y << 16, v.y & 0xffff0000u);
  } else {
    return *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(sums) + at);
  }
}

// How the sums become floats: as they are, or corrected for zero points in 32 or 64 bits.
enum class Total { kPlain, kNarrow, kWide };

template <DType kSums, Total kTotal>
__device__ __forceinline__ void Scale(const uint4& bits, const Fixed& row, const Columns& columns,
                                      int64_t depth, float (&y)[4]) {
  const uint32_t sums[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum;
    if constexpr (kTotal == Total::kWide) {
      sum = ToFloat(TotalOf(sums[i], row, columns, i, depth));
    } else if constexpr (kTotal == Total::kNarrow) {
      sum = static_cast<float>(static_cast<int32_t>(sums[i]) - row.zero * columns.sum[i] -
                               columns.zero[i] * row.rest);
    } else if constexpr (kSums == DType::kS32) {
      sum = static_cast<float>(static_cast<int32_t>(sums[i]));
    } else {
      sum = FloatFromBits(sums[i]);
    }
    y[i] = sum * row.scale * columns.scale[i];
  }
}

template <DType kSums, Total kTotal>
__device__ __forceinline__ void ScaleRows(const uint4 (&sums)[kAhead], const Place& place,
                                          const Fixed* row_fixes, const Columns& columns,
                                          int64_t depth, Rows& y) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    const Fixed fixed = row_fixes[place.At(j)];
    Scale<kSums, kTotal>(sums[j], fixed, columns, depth, y[j]);
  }
}

// The magnitude, or 2^31 if it is larger.
__device__ __forceinline__ uint32_t Magnitude(int64_t value) {
  const uint64_t magnitude = static_cast<uint64_t>(value < 0 ? -value : value);
  return magnitude >> 31 ? 1u << 31 : static_cast<uint32_t>(magnitude);
}

// The largest magnitudes of `zero` and `rest` of a block's rows, in shared memory.
struct Most {
  uint32_t zero, rest;
};

// Whether no total, nor any part of one, can leave 32 bits; a product of two 8-bit values has 16.
__device__ __forceinline__ bool FitsNarrow(const Most& most, int64_t depth,
                                           const Columns& columns) {
  uint32_t sum = 0, zero = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = max(sum, Magnitude(columns.sum[i])), zero = max(zero, Magnitude(columns.zero[i]));
  }
  const float products = 65536.0f * static_cast<float>(depth);
  return products + static_cast<float>(most.zero) * static_cast<float>(sum) +
             static_cast<float>(most.rest) * static_cast<float>(zero) <
         0x1.ep30f;
}

template <DType kType>
__device__ __forceinline__ void AddRowsOf(const Finish& f, const Place& place, Rows& y) {
  const Bits<kType>* from =
      static_cast<const Bits<kType>*>(f.residual) + place.In(f.residual_plane);
  uint32_t words[kAhead][SizeOf(kType)];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    LoadWords(from + place.At(j, f.residual_plane.row), 4 * SizeOf(kType), words[j]);
  }
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    float values[4];
#pragma unroll
    for (int i = 0; i < SizeOf(kType); ++i) {
      DecodeWord<kType>(words[j][i], values + i * kPerWord<kType>);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[j][i] += values[i];
  }
}

__device__ __forceinline__ void AddRows(const Finish& f, const Place& place, Rows& y) {
  if (f.residual_plane.dtype == DType::kBF16) {
    AddRowsOf<DType::kBF16>(f, place, y);
  } else if (f.residual_plane.dtype == DType::kF16) {
    AddRowsOf<DType::kF16>(f, place, y);
  } else {
    AddRowsOf<DType::kF32>(f, place, y);
  }
}

// The divisors come from the L1 cache each time: they would be four more registers for all.
__device__ __forceinline__ void Divide(const Finish& f, const Place& place, Rows& y) {
  float divisors[4];
  LoadPlane(f.out_scale_plane, f.out_scale, Quad{place.b, 0, place.c, 4}, 1.0f, divisors);
#pragma unroll
  for (int k = 0; k < 4 * kAhead; ++k) y[k / 4][k % 4] /= divisors[k % 4];
}

template <float (*kActivation)(float)>
__device__ __forceinline__ void ActivateBy(Rows& y) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[j][i] = kActivation(y[j][i]);
  }
}

__device__ __forceinline__ void Activate(Activation activation, Rows& y) {
  if (activation == Activation::kRelu) ActivateBy<ReluF32>(y);
  if (activation == Activation::kGeluTanh) ActivateBy<GeluTanhF32>(y);
  if (activation == Activation::kGeluErf) ActivateBy<GeluErfF32>(y);
  if (activation == Activation::kSilu) ActivateBy<SiluF32>(y);
}

template <DType kOut>
__device__ __forceinline__ void StoreRowsAs(const Finish& f, const Place& place, int there,
                                            const Rows& y) {
  Bits<kOut>* to = static_cast<Bits<kOut>*>(f.out) + place.In(f.out_plane);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    uint32_t words[SizeOf(kOut)];
#pragma unroll
    for (int i = 0; i < SizeOf(kOut); ++i) words[i] = EncodeWord<kOut>(y[j] + i * kPerWord<kOut>);
    if (j < there) StoreRun(to + place.At(j, f.out_plane.row), 4, 4 * SizeOf(kOut), words);
  }
}

__device__ __forceinline__ void StoreRows(const Finish& f, const Place& place, int there,
                                          const Rows& y) {
  switch (f.out_plane.dtype) {
    case DType::kF32:
      return StoreRowsAs<DType::kF32>(f, place, there, y);
    case DType::kBF16:
      return StoreRowsAs<DType::kBF16>(f, place, there, y);
    case DType::kF16:
      return StoreRowsAs<DType::kF16>(f, place, there, y);
    case DType::kE4M3:
      return StoreRowsAs<DType::kE4M3>(f, place, there, y);
    case DType::kE5M2:
      return StoreRowsAs<DType::kE5M2>(f, place, there, y);
    case DType::kS8:
      return StoreRowsAs<DType::kS8>(f, place, there, y);
    default:
      return StoreRowsAs<DType::kU8>(f, place, there, y);
  }
}

// The largest |y| of the rows that are there; raises the amax itself where it has a cell per row.
__device__ __forceinline__ uint32_t AmaxOfRows(const Finish& f, const Place& place, int there,
                                               const Rows& y) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) seen = max(seen, MagnitudeBits(y[j][i]));
    seen = j < there ? AmaxBits(seen) : 0u;
    largest = max(largest, seen);
    if (f.amax_kind != AmaxKind::kPerRow) continue;
    seen = __reduce_max_sync(~0u, seen);
    if (threadIdx.x % 32 == 0 && seen > 0) {
      atomicMax(f.amax + f.amax_plane.At(place.b, place.first_row + place.At(j), 0), seen);
    }
  }
  return largest;
}

// 2^log_group threads (32 to 128) to a row, `deep` rows (a multiple of kAhead) to a thread.
template <DType kSums, bool kZero>
__global__ void __launch_bounds__(kEvenThreads, kResident<kZero>)
    RunEven(const Epilogue e, int log_group, int deep) {
  __shared__ Fixed row_fixes[kBlockRows];
  __shared__ Most most;
  if (kZero && threadIdx.x == 0) most = Most{0, 0};
  const Finish& f = e.finish;
  const int64_t local_b = blockIdx.z, b = e.batch + local_b;
  const int step = kEvenThreads >> log_group;  // rows that the block takes side by side
  const int line = static_cast<int>(threadIdx.x) >> log_group;
  const int64_t first_row = int64_t{blockIdx.y} * (step * deep);
  const int64_t wanted =
      ((int64_t{blockIdx.x} << log_group) + (threadIdx.x & ((1 << log_group) - 1))) * 4;
  const bool inside = wanted < e.columns;
  const int64_t c = inside ? wanted : 0;
  const int rows = static_cast<int>(min(int64_t{step * deep}, e.rows - first_row));
  Place place{b, e.row + first_row, e.column + c, line, step, rows - 1};
  const int64_t start = local_b * e.sums_batch + first_row * e.sums_row + c;
  uint4 sums[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    sums[j] = LoadFour<kSums>(e.sums, start + place.At(j, e.sums_row));
  }
  static_assert(kBlockRows <= kEvenThreads);
  const bool has_row = threadIdx.x < rows;
  const int64_t r = first_row + (has_row ? threadIdx.x : 0);
  Fixed fixed = Fetch(e.lhs, local_b, b, r, e.row + r);
  Columns columns;
  FetchColumns<kZero>(e, local_b, Quad{b, place.first_row, place.c, 4}, columns);
  if constexpr (kZero) __syncthreads();
  if (has_row) {
    if constexpr (kZero) {
      const int64_t rest = fixed.sum - e.depth * fixed.zero;
      fixed.rest = static_cast<int32_t>(rest);
      atomicMax(&most.zero, Magnitude(fixed.zero)), atomicMax(&most.rest, Magnitude(rest));
    }
    row_fixes[threadIdx.x] = fixed;
  }
  __syncthreads();
  const bool narrow = kZero && FitsNarrow(most, e.depth, columns);
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = kAhead;; i += kAhead) {
    const int left = place.row < rows ? (rows - place.row + step - 1) / step : 0;
    const int there = inside ? left : 0;
    Rows y;
    if constexpr (!kZero) {
      ScaleRows<kSums, Total::kPlain>(sums, place, row_fixes, columns, e.depth, y);
    } else if (narrow) {
      ScaleRows<kSums, Total::kNarrow>(sums, place, row_fixes, columns, e.depth, y);
    } else {
      ScaleRows<kSums, Total::kWide>(sums, place, row_fixes, columns, e.depth, y);
    }
    // The next batch comes while this one is finished.
    Place next = place;
    next.row += kAhead * step;
    if (i < deep) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        sums[j] = LoadFour<kSums>(e.sums, start + next.At(j, e.sums_row));
      }
    }
    if (f.residual_plane) AddRows(f, place, y);
    if (f.bias_plane) {
#pragma unroll
      for (int k = 0; k < 4 * kAhead; ++k) y[k / 4][k % 4] += columns.bias[k % 4];
    }
    if (f.activation != Activation::kNone) Activate(f.activation, y);
    if (f.amax_kind != AmaxKind::kNone) largest = max(largest, AmaxOfRows(f, place, there, y));
    if (f.out_scale_plane) Divide(f, place, y);
    StoreRows(f, place, there, y);
    if (i >= deep) break;
    place = next;
  }
  RaiseOne(f, b, largest);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_VECTORIZED_CUH_
