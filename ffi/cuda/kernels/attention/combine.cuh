// Combines sums over parts of the tokens. Part i has the maximum m_i of its scores, the sum w_i of
// exp(score - m_i) and sums s_i of weighted values:
//
//   out = sum_i s_i exp(m_i - m) / sum_i w_i exp(m_i - m),    m = max m_i
//
// The order is fixed, so equal inputs give equal bits.

#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/attention/arguments.h"
#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/common/element.cuh"

namespace jaxfp8::cuda::attention {

inline constexpr float kLog2E = 1.4426950408889634f;

// The sums of a warp, and then of a CTA. Value `e` of lane group g is at 8 e + g. Padded: lanes
// that store two rows apart use other banks.
template <int kWidth>
struct Partial {
  float largest[kTileRows], weights[kTileRows];
  float sums[kTileRows][kWidth + 4];
};

// exp(m_i - m). A part without tokens has m_i = -inf and the factor 0.
__device__ __forceinline__ float FactorOf(float part, float largest) {
  return part == -INFINITY ? 0.0f : exp2f((part - largest) * kLog2E);
}

__device__ __forceinline__ float LoadFromRankOne(const float* address, int rank) {
  float value = 0.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(SharedAddress(address)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#endif
  return value;
}

// Stores an output of a row of the tile.
__device__ __forceinline__ void Store(const Arguments& a, int64_t pair, int row, int place,
                                      int width, float value) {
  if (row >= a.p.rows) return;
  const int64_t to = (pair * a.p.rows + row) * width + place;
  if (a.p.out == DType::kF32) {
    static_cast<float*>(a.b.out)[to] = value;
  } else {
    static_cast<uint16_t*>(a.b.out)[to] = Encode<DType::kBF16>(value);
  }
}

// The maximum and the sum of weights of a row over parts.
//   largest, weights  those of a part, by its number
template <class Largest, class Weights>
__device__ __forceinline__ float2 Total(int parts, Largest largest, Weights weights) {
  float highest = -INFINITY, total = 0.0f;
  for (int i = 0; i < parts; ++i) highest = fmaxf(highest, largest(i));
  for (int i = 0; i < parts; ++i) total += weights(i) * FactorOf(largest(i), highest);
  return {highest, total};
}

template <class StepValues>
__device__ __forceinline__ int PlaceInVector(int index) {
  return StepValues::PlaceOf(index % 8, index / 8);
}

// Combines the warps of a CTA. The result is in partials[0], or stored if there is one part.
template <class StepValues, class At, int kWidth>
__device__ __forceinline__ void CombineWarps(const Arguments& a, const At& at,
                                             Partial<kWidth> (&partials)[kWarps]) {
  for (int i = threadIdx.x; i < kTileRows * kWidth; i += 32 * kWarps) {
    const int row = i / kWidth, index = i % kWidth;
    const auto largest = [&](int warp) { return partials[warp].largest[row]; };
    const float2 total =
        Total(kWarps, largest, [&](int warp) { return partials[warp].weights[row]; });
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += partials[warp].sums[row][index] * FactorOf(largest(warp), total.x);
    }
    if (a.parts == 1) {
      Store(a, at.text * a.p.heads + at.head, at.tile * kTileRows + row,
            PlaceInVector<StepValues>(index), kWidth, sum / total.y);
    } else {
      partials[0].sums[row][index] = sum;
    }
  }
  if (a.parts == 1) return;
  float2 total = {};
  const int row = threadIdx.x;
  if (row < kTileRows) {
    total = Total(
        kWarps, [&](int warp) { return partials[warp].largest[row]; },
        [&](int warp) { return partials[warp].weights[row]; });
  }
  __syncthreads();
  if (row < kTileRows) partials[0].largest[row] = total.x, partials[0].weights[row] = total.y;
}

// Combines the CTAs of a cluster: each stores its share of the outputs.
template <class StepValues, class At, int kWidth>
__device__ __forceinline__ void CombineCluster(const Arguments& a, const At& at,
                                               const Partial<kWidth>& own) {
  ClusterArrive();
  ClusterWait();
  for (int i = at.part * 32 * kWarps + threadIdx.x; i < kTileRows * kWidth;
       i += a.parts * 32 * kWarps) {
    const int row = i / kWidth, index = i % kWidth;
    float largest[kMaxInCluster], weights[kMaxInCluster], sums[kMaxInCluster];
#pragma unroll
    for (int rank = 0; rank < kMaxInCluster; ++rank) {
      largest[rank] = -INFINITY, weights[rank] = sums[rank] = 0.0f;
      if (rank < a.parts) {
        largest[rank] = LoadFromRankOne(&own.largest[row], rank);
        weights[rank] = LoadFromRankOne(&own.weights[row], rank);
        sums[rank] = LoadFromRankOne(&own.sums[row][index], rank);
      }
    }
    float highest = -INFINITY, total = 0.0f, sum = 0.0f;
#pragma unroll
    for (float one : largest) highest = fmaxf(highest, one);
#pragma unroll
    for (int rank = 0; rank < kMaxInCluster; ++rank) {
      const float factor = FactorOf(largest[rank], highest);
      total += weights[rank] * factor, sum += sums[rank] * factor;
    }
    Store(a, at.text * a.p.heads + at.head, at.tile * kTileRows + row,
          PlaceInVector<StepValues>(index), kWidth, sum / total);
  }
  ClusterArrive();
  ClusterWait();
}

// The scratch of a CTA: maxima and sums of weights of its rows, then their sums.
template <int kWidth>
__device__ __forceinline__ float* ScratchOf(const Arguments& a, int64_t cta) {
  return static_cast<float*>(a.b.scratch) + cta * PartFloats(kWidth);
}

template <int kWidth>
__device__ __forceinline__ void StorePartial(const Arguments& a, const Partial<kWidth>& own) {
  float* to = ScratchOf<kWidth>(a, blockIdx.x);
  if (threadIdx.x < kTileRows) {
    to[threadIdx.x] = own.largest[threadIdx.x];
    to[kTileRows + threadIdx.x] = own.weights[threadIdx.x];
  }
  for (int i = threadIdx.x; i < kTileRows * kWidth; i += 32 * kWarps) {
    to[2 * kTileRows + i] = own.sums[i / kWidth][i % kWidth];
  }
}

template <class StepValues, class At, int kWidth>
__device__ __forceinline__ void Combine(const Arguments& a, const At& at,
                                        Partial<kWidth> (&partials)[kWarps]) {
  CombineWarps<StepValues>(a, at, partials);
  if (a.parts == 1) return;
  __syncthreads();
  if (a.cluster) {
    CombineCluster<StepValues>(a, at, partials[0]);
  } else {
    StorePartial(a, partials[0]);
  }
}

// The second kernel: a CTA combines the parts of one row. Its warps share the parts.
template <class StepValues, int kWidth>
__global__ void __launch_bounds__(1024) CombineParts(const __grid_constant__ Arguments a) {
  constexpr int kShares = 1024 / kWidth;
  __shared__ float sums[kShares][kWidth];
  __shared__ float totals[2];
  const int row = blockIdx.x % kTileRows, share = threadIdx.x / kWidth,
            index = threadIdx.x % kWidth;
  const int64_t tile = blockIdx.x / kTileRows;
  const float* parts = ScratchOf<kWidth>(a, tile * a.parts);
  const auto largest = [&](int i) { return __ldg(parts + i * PartFloats(kWidth) + row); };
  if (threadIdx.x < 32) {
    float highest = -INFINITY, total = 0.0f;
    for (int i = threadIdx.x; i < a.parts; i += 32) highest = fmaxf(highest, largest(i));
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, lanes));
    }
    for (int i = threadIdx.x; i < a.parts; i += 32) {
      total +=
          __ldg(parts + i * PartFloats(kWidth) + kTileRows + row) * FactorOf(largest(i), highest);
    }
    for (int lanes = 1; lanes < 32; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
    if (threadIdx.x == 0) totals[0] = highest, totals[1] = total;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 4
  for (int i = share; i < a.parts; i += kShares) {
    sum += __ldg(parts + i * PartFloats(kWidth) + 2 * kTileRows + row * kWidth + index) *
           FactorOf(largest(i), totals[0]);
  }
  sums[share][index] = sum;
  __syncthreads();
  if (share > 0) return;
  for (int i = 1; i < kShares; ++i) sum += sums[i][index];
  Store(a, tile / a.tiles, static_cast<int>(tile % a.tiles) * kTileRows + row,
        PlaceInVector<StepValues>(index), kWidth, sum / totals[1]);
}

}  // namespace jaxfp8::cuda::attention
