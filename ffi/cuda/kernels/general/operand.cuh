// One side of the general kernel: decodes 64 lines x 32 K into shared memory.
//
//   global, any dtype and layout     a thread loads 16 consecutive values of a line (K-contiguous)
//                                    or of a depth (MN-major)
//   registers                        decoded, - zero_point, * scale if it varies along K
//   shared [32 K][64 lines + 4]      padded rows, zeros past the end

#pragma once

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/general/general.h"

namespace jaxfp8::cuda {

inline constexpr int kGeneralThreads = 128;
inline constexpr int kTile = kGeneralTile;
inline constexpr int kStep = 32;          // K per pass
inline constexpr int kRun = 16;           // consecutive values loaded by a thread
inline constexpr int kPitch = kTile + 4;  // rows stay 16-byte aligned and start 4 banks apart

// A side with its arrays.
struct StridedOperand {
  Side side;
  const void* values;
  const void* scale;
  ScaleForm form;
  const int32_t* zero_point;
  int64_t lines;
  int64_t inner_batch;  // of the problem
  int alignment;        // in bytes, of runs starting at a multiple of kRun

  // The index along the outer batch axis, for jumps.
  __device__ __forceinline__ int64_t Outer(int64_t b) const { return TileOf(b, inner_batch); }
  // The index of a value's scale and zero point.
  __device__ __forceinline__ int64_t TileAt(int64_t b, int64_t f, int64_t k) const {
    return cuda::TileAt(side.tiles, b, f, k) + Outer(b) * side.tiles.batch_jump;
  }
  __device__ __forceinline__ float Scale(int64_t at) const {
    return ScaleOf(form, LoadScale(scale, form, at));
  }
};

// A run in registers.
template <typename Value>
struct Run {
  Value v[kRun];
};

template <DType kType, typename Value>
__device__ __forceinline__ void LoadAs(const StridedOperand& o, int64_t at, int64_t count,
                                       Run<Value>& run) {
  uint32_t words[kRun * SizeOf(kType) / 4];
  LoadRun(static_cast<const Bits<kType>*>(o.values) + at, count, o.alignment, words);
  if constexpr (IsInt8(kType)) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t byte = words[i / 4] >> (8 * (i % 4)) & 0xffu;
      run.v[i] = static_cast<Value>(kType == DType::kS8 ? static_cast<int8_t>(byte)
                                                        : static_cast<int32_t>(byte));
    }
  } else if constexpr (std::is_same_v<Value, float>) {
#pragma unroll
    for (int i = 0; i < kRun / kPerWord<kType>; ++i) {
      DecodeWord<kType>(words[i], run.v + i * kPerWord<kType>);
    }
  }
}

template <typename Value>
__device__ __forceinline__ void LoadValues(const StridedOperand& o, int64_t at, int64_t count,
                                           Run<Value>& run) {
  switch (o.side.dtype) {
    case DType::kS8:
      return LoadAs<DType::kS8>(o, at, count, run);
    case DType::kU8:
      return LoadAs<DType::kU8>(o, at, count, run);
    case DType::kE4M3:
      return LoadAs<DType::kE4M3>(o, at, count, run);
    case DType::kE5M2:
      return LoadAs<DType::kE5M2>(o, at, count, run);
    case DType::kBF16:
      return LoadAs<DType::kBF16>(o, at, count, run);
    case DType::kF16:
      return LoadAs<DType::kF16>(o, at, count, run);
    default:
      return LoadAs<DType::kF32>(o, at, count, run);
  }
}

template <typename Value>
__device__ __forceinline__ void Dequantize(const StridedOperand& o, int64_t b, int64_t f, int64_t k,
                                           int64_t count, Run<Value>& run) {
  const Tiles& t = o.side.tiles;
  const bool scaled = std::is_same_v<Value, float> && o.scale && !t.ConstantAlongDepth();
  if (!scaled && !o.zero_point) return;
  const bool mn_major = o.side.IsMnMajor();
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i >= count) break;
    const int64_t at = o.TileAt(b, mn_major ? f + i : f, mn_major ? k : k + i);
    if (o.zero_point) run.v[i] -= static_cast<Value>(o.zero_point[at]);
    if (scaled) run.v[i] *= static_cast<Value>(o.Scale(at));
  }
}

// Copies lines [first, first + kTile) at depths [start, start + kStep) to shared memory, and zeros
// past their ends.
template <typename Value>
__device__ __forceinline__ void StageOperand(const StridedOperand& o, int64_t depth, int64_t b,
                                             int64_t first, int64_t start,
                                             Value (&to)[kStep][kPitch]) {
  const bool mn_major = o.side.IsMnMajor();
  const int line = mn_major ? threadIdx.x % 4 * kRun : threadIdx.x / 2;
  const int step = mn_major ? threadIdx.x / 4 : threadIdx.x % 2 * kRun;
  const int64_t f = first + line, k = start + step;
  int64_t count = f < o.lines && k < depth ? (mn_major ? o.lines - f : depth - k) : 0;
  count = min(count, int64_t{kRun});
  Run<Value> run{};
  if (count > 0) {
    const Side& s = o.side;
    const int64_t of_batch = b * s.batch_stride + o.Outer(b) * s.batch_jump;
    LoadValues(o, of_batch + f * s.free_stride + k * s.depth_stride, count, run);
    Dequantize(o, b, f, k, count, run);
  }
  if (mn_major) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step][line + i] = run.v[i];
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step + i][line] = run.v[i];
  }
}

// The scale to apply after the sum. 1 if it was applied before or there is none.
__device__ __forceinline__ float ScaleAfter(const StridedOperand& o, int64_t b, int64_t f) {
  const Tiles& t = o.side.tiles;
  return o.scale && t.ConstantAlongDepth() ? o.Scale(o.TileAt(b, f, 0)) : 1.0f;
}

}  // namespace jaxfp8::cuda
