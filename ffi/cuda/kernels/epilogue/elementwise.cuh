// The elementwise part of the epilogue, common to every kernel with an output:
//
//   y = activation(x + residual + bias);  amax = max |y|;  out = cast(y / out_scale)
//
// x is the dequantized sum, in float32 registers: four consecutive columns of a row a thread.

#pragma once

#include "common/activation_f32.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// The outputs of one amax cell: none, all of a matrix, a row, or others.
enum class AmaxKind : uint8_t { kNone, kOne, kPerRow, kOther };

// The arguments: planes with their data, and the widths of their accesses in bytes.
struct Elementwise {
  Plane residual_plane, bias_plane, out_scale_plane, amax_plane, out_plane;
  const void* residual;
  const float *bias, *out_scale;
  void* out;
  uint32_t* amax;
  Activation activation;
  AmaxKind amax_kind;
  int residual_alignment, out_alignment;  // at multiples of 4 columns
};

inline int AlignmentOfPlane(const Plane& plane, const void* data) {
  if (!plane || plane.column_stride != 1) return 1;
  const int64_t size = SizeOf(plane.dtype);
  return AlignmentOf(data, {plane.row_stride * size, plane.batch_stride * size, 4 * size});
}

inline AmaxKind AmaxKindOf(const Plane& amax) {
  if (!amax) return AmaxKind::kNone;
  if (amax.column_stride != 0) return AmaxKind::kOther;
  return amax.row_stride == 0 ? AmaxKind::kOne : AmaxKind::kPerRow;
}

// The caller gives an array for each plane of the problem, and no other.
inline Elementwise MakeElementwise(const Problem& problem, const Buffers& buffers) {
  Elementwise ew{};
  ew.residual_plane = problem.residual, ew.bias_plane = problem.bias;
  ew.out_scale_plane = problem.out_scale, ew.amax_plane = problem.amax, ew.out_plane = problem.out;
  ew.residual = buffers.residual, ew.bias = buffers.bias, ew.out_scale = buffers.out_scale;
  ew.out = buffers.out, ew.amax = reinterpret_cast<uint32_t*>(buffers.amax);
  ew.activation = problem.activation;
  ew.amax_kind = AmaxKindOf(problem.amax);
  ew.residual_alignment = AlignmentOfPlane(problem.residual, buffers.residual);
  ew.out_alignment = AlignmentOfPlane(problem.out, buffers.out);
  return ew;
}

#ifdef __CUDACC__

// Four consecutive columns of a row. Only the first `count` exist.
struct Quad {
  int64_t b, r, c;
  int count;
};

__device__ __forceinline__ float LoadWide(DType type, const void* data, int64_t at) {
  if (type == DType::kF32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return type == DType::kBF16 ? DecodeBF16(bits) : DecodeFloat16<DType::kF16>(bits);
}

__device__ __forceinline__ void AddResidual(const Elementwise& ew, const Quad& q, float (&y)[4]) {
  const Plane& plane = ew.residual_plane;
  const int64_t at = plane.At(q.b, q.r, q.c);
  if (plane.column_stride == 1 && q.count == 4 &&
      ew.residual_alignment >= 4 * SizeOf(plane.dtype)) {
    float values[4];
    if (plane.dtype == DType::kF32) {
      const float4 v =
          *reinterpret_cast<const float4*>(static_cast<const float*>(ew.residual) + at);
      values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    } else {
      const uint2 v =
          *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(ew.residual) + at);
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
    if (i < q.count) y[i] += LoadWide(plane.dtype, ew.residual, at + i * plane.column_stride);
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

// The magnitude |y| as bits. Bits of magnitudes compare like the magnitudes, and NaN is above them
// all.
__device__ __forceinline__ uint32_t MagnitudeBits(float y) { return BitsOf(y) & 0x7fffffffu; }

// A maximum as it is stored: every NaN becomes the same NaN.
__device__ __forceinline__ uint32_t AmaxBits(uint32_t largest) {
  return largest > 0x7f800000u ? 0x7fc00000u : largest;
}

template <DType kOut>
__device__ __forceinline__ void StoreAs(const Elementwise& ew, const Quad& q, const float (&y)[4]) {
  constexpr int kWords = SizeOf(kOut);
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = EncodeWord<kOut>(y + i * kPerWord<kOut>);
  Bits<kOut>* to = static_cast<Bits<kOut>*>(ew.out) + ew.out_plane.At(q.b, q.r, q.c);
  if (ew.out_plane.column_stride == 1) return StoreRun(to, q.count, ew.out_alignment, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.count) to[i * ew.out_plane.column_stride] = Encode<kOut>(y[i]);
  }
}

__device__ __forceinline__ void Store(const Elementwise& ew, const Quad& q, const float (&y)[4]) {
  WithType(ew.out_plane.dtype, [&]<DType kOut>() { StoreAs<kOut>(ew, q, y); });
}

// Stores an int32 output: the accumulators themselves, modulo 2^32.
__device__ __forceinline__ void StoreIntegers(const Elementwise& ew, const Quad& q,
                                              const uint32_t (&acc)[4]) {
  uint32_t* to = static_cast<uint32_t*>(ew.out) + ew.out_plane.At(q.b, q.r, q.c);
  if (ew.out_plane.column_stride == 1) return StoreRun(to, q.count, ew.out_alignment, acc);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < q.count) to[i * ew.out_plane.column_stride] = acc[i];
  }
}

// Returns the largest |y| of a quad, as bits. Raises the amax itself for `AmaxKind::kOther`.
__device__ __forceinline__ uint32_t AmaxOf(const Elementwise& ew, const Quad& q,
                                           const float (&y)[4]) {
  uint32_t largest = 0;
  if (ew.amax_kind == AmaxKind::kNone) return largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= q.count) break;
    const uint32_t bits = AmaxBits(MagnitudeBits(y[i]));
    largest = max(largest, bits);
    if (ew.amax_kind == AmaxKind::kOther) {
      atomicMax(ew.amax + ew.amax_plane.At(q.b, q.r, q.c + i), bits);
    }
  }
  return largest;
}

// Applies the elementwise epilogue to y and stores it; returns the largest |y| as bits.
__device__ __forceinline__ uint32_t ApplyElementwise(const Elementwise& ew, const Quad& q,
                                                     const float (&bias)[4],
                                                     const float (&out_scale)[4], float (&y)[4]) {
  if (ew.residual_plane) AddResidual(ew, q, y);
  if (ew.bias_plane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += bias[i];
  }
  if (ew.activation != Activation::kNone) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = ApplyF32(ew.activation, y[i]);
  }
  const uint32_t largest = AmaxOf(ew, q, y);
  if (ew.out_scale_plane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = y[i] / out_scale[i];
  }
  Store(ew, q, y);
  return largest;
}

// The same with the bias and the divisors of the four columns loaded here.
//   biased  else there is no bias: the row is of no group
__device__ __forceinline__ uint32_t ApplyWithPlanes(const Elementwise& ew, const Quad& q,
                                                    bool biased, float (&y)[4]) {
  float bias[4] = {}, out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (ew.bias_plane && biased) LoadPlane(ew.bias_plane, ew.bias, q, 0.0f, bias);
  if (ew.out_scale_plane) LoadPlane(ew.out_scale_plane, ew.out_scale, q, 1.0f, out_scale);
  return ApplyElementwise(ew, q, bias, out_scale, y);
}

// Raises the amax of a matrix to the largest |y| of a warp.
__device__ __forceinline__ void UpdateMatrixAmax(const Elementwise& ew, int64_t b,
                                                 uint32_t largest) {
  if (ew.amax_kind != AmaxKind::kOne) return;
  largest = __reduce_max_sync(~0u, largest);
  uint32_t* cell = ew.amax + ew.amax_plane.At(b, 0, 0);
  // Atomics on one address are serialised. Reading first avoids nearly all of them.
  if (threadIdx.x % 32 == 0 && largest > __ldcg(cell)) atomicMax(cell, largest);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
