// From finished sums to the output, for every kernel that ends a product:
//
//   y = activation(sum + residual + bias);  amax = max |y|;  out = cast(y / out_scale)

#ifndef JAXFP8_CUDA_KERNELS_EPILOGUE_ELEMENTWISE_CUH_
#define JAXFP8_CUDA_KERNELS_EPILOGUE_ELEMENTWISE_CUH_

#include "common/activation_f32.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// How many outputs share a cell of the amax.
enum class AmaxKind : uint8_t { kNone, kOne, kPerRow, kOther };

// The planes of a problem with their data, and how wide their accesses may be.
struct Finish {
  Plane residual_plane, bias_plane, out_scale_plane, amax_plane, out_plane;
  const void* residual;
  const float *bias, *out_scale;
  void* out;
  uint32_t* amax;
  Activation activation;
  AmaxKind amax_kind;
  int residual_alignment, out_alignment;  // of runs that start at a multiple of 4 columns
};

inline int AlignmentOfPlane(const Plane& plane, const void* data) {
  if (!plane || plane.column != 1) return 1;
  const int64_t size = SizeOf(plane.dtype);
  return AlignmentOf(data, {plane.row * size, plane.batch * size, 4 * size});
}

inline AmaxKind AmaxKindOf(const Plane& amax) {
  if (!amax) return AmaxKind::kNone;
  if (amax.column != 0) return AmaxKind::kOther;
  return amax.row == 0 ? AmaxKind::kOne : AmaxKind::kPerRow;
}

// A plane that is there although its array is not (or the reverse) is the caller's error.
inline Finish MakeFinish(const Problem& problem, const Buffers& buffers) {
  Finish f{};
  f.residual_plane = problem.residual, f.bias_plane = problem.bias;
  f.out_scale_plane = problem.out_scale, f.amax_plane = problem.amax, f.out_plane = problem.out;
  f.residual = buffers.residual, f.bias = buffers.bias, f.out_scale = buffers.out_scale;
  f.out = buffers.out, f.amax = reinterpret_cast<uint32_t*>(buffers.amax);
  f.activation = problem.activation;
  f.amax_kind = AmaxKindOf(problem.amax);
  f.residual_alignment = AlignmentOfPlane(problem.residual, buffers.residual);
  f.out_alignment = AlignmentOfPlane(problem.out, buffers.out);
  return f;
}

#ifdef __CUDACC__

// Four consecutive columns of a row, of which `count` are there.
struct Quad {
  int64_t b, r, c;
  int count;
};

__device__ __forceinline__ float LoadWide(DType type, const void* data, int64_t at) {
  if (type == DType::kF32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return type == DType::kBF16 ? DecodeBF16(bits) : DecodeFloat16<DType::kF16>(bits);
}

__device__ __forceinline__ void AddResidual(const Finish& f, const Quad& q, float (&y)[4]) {
  const Plane& plane = f.residual_plane;
  const int64_t at = plane.At(q.b, q.r, q.c);
  if (plane.column == 1 && q.count == 4 && f.residual_alignment >= 4 * SizeOf(plane.dtype)) {
    float values[4];
    if (plane.dtype == DType::kF32) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(f.residual) + at);
      values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    } else {
      const uint2 v =
          *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(f.residual) + at);
      if (plane.dtype == DType::kBF16) {
        DecodeWord<DType::kBF16>(v.x, values), DecodeWord<DType::kBF16>(v.y, values + 2);
      } else {
        DecodeWord<DType::kF16>(v.x, values), DecodeWord<DType::kF16>(v.y, values + 2);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += values[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.count) y[i] += LoadWide(plane.dtype, f.residual, at + i * plane.column);
  }
}

// Values of a float32 plane at four columns; missing columns get `otherwise`.
__device__ __forceinline__ void LoadPlane(const Plane& plane, const float* data, const Quad& q,
                                          float otherwise, float (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = i < q.count ? data[plane.At(q.b, q.r, q.c + i)] : otherwise;
  }
}

// Magnitudes compare like their bits, and NaN above them all: maxima are taken of these.
__device__ __forceinline__ uint32_t MagnitudeBits(float y) { return BitsOf(y) & 0x7fffffffu; }

// A maximum of them for memory, where any NaN is the same.
__device__ __forceinline__ uint32_t AmaxBits(uint32_t largest) {
  return largest > 0x7f800000u ? 0x7fc00000u : largest;
}

template <DType kOut>
__device__ __forceinline__ void StoreAs(const Finish& f, const Quad& q, const float (&y)[4]) {
  constexpr int kWords = SizeOf(kOut);
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = EncodeWord<kOut>(y + i * kPerWord<kOut>);
  Bits<kOut>* to = static_cast<Bits<kOut>*>(f.out) + f.out_plane.At(q.b, q.r, q.c);
  if (f.out_plane.column == 1) return StoreRun(to, q.count, f.out_alignment, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.count) to[i * f.out_plane.column] = Encode<kOut>(y[i]);
  }
}

__device__ __forceinline__ void Store(const Finish& f, const Quad& q, const float (&y)[4]) {
  switch (f.out_plane.dtype) {
    case DType::kF32:
      return StoreAs<DType::kF32>(f, q, y);
    case DType::kBF16:
      return StoreAs<DType::kBF16>(f, q, y);
    case DType::kF16:
      return StoreAs<DType::kF16>(f, q, y);
    case DType::kE4M3:
      return StoreAs<DType::kE4M3>(f, q, y);
    case DType::kE5M2:
      return StoreAs<DType::kE5M2>(f, q, y);
    case DType::kS8:
      return StoreAs<DType::kS8>(f, q, y);
    default:
      return StoreAs<DType::kU8>(f, q, y);
  }
}

// An int32 output: the sums themselves, modulo 2^32.
__device__ __forceinline__ void StoreIntegers(const Finish& f, const Quad& q,
                                              const uint32_t (&sums)[4]) {
  uint32_t* to = static_cast<uint32_t*>(f.out) + f.out_plane.At(q.b, q.r, q.c);
  if (f.out_plane.column == 1) return StoreRun(to, q.count, f.out_alignment, sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.count) to[i * f.out_plane.column] = sums[i];
  }
}

// The largest |y| of a quad, as bits; raises the amax itself where its cells are not per row.
__device__ __forceinline__ uint32_t AmaxOf(const Finish& f, const Quad& q, const float (&y)[4]) {
  uint32_t largest = 0;
  if (f.amax_kind == AmaxKind::kNone) return largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= q.count) break;
    const uint32_t bits = AmaxBits(MagnitudeBits(y[i]));
    largest = max(largest, bits);
    if (f.amax_kind == AmaxKind::kOther) {
      atomicMax(f.amax + f.amax_plane.At(q.b, q.r, q.c + i), bits);
    }
  }
  return largest;
}

// Everything after the sums, `bias` and `out_scale` given; returns the largest |y| as bits.
__device__ __forceinline__ uint32_t FinishQuad(const Finish& f, const Quad& q,
                                               const float (&bias)[4], const float (&out_scale)[4],
                                               float (&y)[4]) {
  if (f.residual_plane) AddResidual(f, q, y);
  if (f.bias_plane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += bias[i];
  }
  if (f.activation != Activation::kNone) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = ApplyF32(f.activation, y[i]);
  }
  const uint32_t largest = AmaxOf(f, q, y);
  if (f.out_scale_plane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = y[i] / out_scale[i];
  }
  Store(f, q, y);
  return largest;
}

// Joins what every thread of a block saw, where one cell takes it all.
__device__ __forceinline__ void RaiseOne(const Finish& f, int64_t b, uint32_t largest) {
  if (f.amax_kind != AmaxKind::kOne) return;
  largest = __reduce_max_sync(~0u, largest);
  uint32_t* cell = f.amax + f.amax_plane.At(b, 0, 0);
  // Atomics on one address go one by one; a look first spares nearly all of them.
  if (threadIdx.x % 32 == 0 && largest > __ldcg(cell)) atomicMax(cell, largest);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_EPILOGUE_ELEMENTWISE_CUH_
