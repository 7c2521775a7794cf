// The main loop of a consumer warpgroup, where sums are scaled after all of K: int8, whose sums are
// exact, and FP8 in fast sums.
//
//   stage in shared memory                          registers of a warpgroup
//   lhs  wave 0, 64 rows x 128 --+  4 x wgmma        acc     every wave: the sum of all of K, int32
//        wave 1, 64 rows x 128 --+  of K = 32          |     or float32
//   rhs  N columns x 128 --------+---------------->    |  + zero points of int8  * scales
//                                                    total   float32
//
// One stage is multiplied while the next one's wgmma are queued, so the tensor cores do not wait.
// With row sums r and column sums c, and zero points y and z, a sum of (lhs - y) * (rhs - z) is
//   acc - y * c - z * (r - K * y)
// It is computed modulo 2^32, which is exact up to kMaxCorrectedDepth.

#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/wgmma.cuh"
#include "cuda/kernels/sm90_gemm/load.cuh"

namespace jaxfp8::cuda::sm90 {

template <DType kLhs>
using Sum = std::conditional_t<IsInt8(kLhs), int32_t, float>;

// The sums of one tile over all of K.
template <typename L, DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void MultiplySums(Sum<kLhs> (&acc)[L::kWgmmas][kColumns / 2],
                                             uint32_t shared, int32_t steps, uint32_t ctas,
                                             Ring<L::kStages>& ring) {
  constexpr int kWgmmaBytes = kWgmmaRows * kStepDepth, kDescriptorStep = 32 >> 4;
  const int32_t warpgroup =
      __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1, 0);
  const uint64_t first_lhs =
      SwizzledMatrixDescriptor(shared + L::kLhsAt + warpgroup * L::kWgmmas * kWgmmaBytes);
  const uint64_t first_rhs = SwizzledMatrixDescriptor(shared + L::kRhsAt);
  uint32_t previous = 0;  // the barrier of the stage before
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[w][i] = 0;
  }
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step, ring.Next()) {
    const uint64_t lhs = first_lhs + ring.stage * (L::kLhsBytes >> 4);
    const uint64_t rhs = first_rhs + ring.stage * (L::kRhsBytes >> 4);
    Wait(shared + L::kFullAt + 8 * ring.stage, ring.parity);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kStepDepth / 32; ++i) {
#pragma unroll
      for (int w = 0; w < L::kWgmmas; ++w) {
        Wgmma<kLhs, kRhs, kColumns>(acc[w], lhs + w * (kWgmmaBytes >> 4) + i * kDescriptorStep,
                                    rhs + i * kDescriptorStep, 1);
      }
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (step > 0) Release(previous, ctas);
    previous = shared + L::kEmptyAt + 8 * ring.stage;
  }
  WgmmaWait<0>();
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) PinAccumulators(acc[w]);
  Release(previous, ctas);
}

// Two neighbouring fields.
__device__ __forceinline__ void LoadShared2(uint32_t from, uint32_t (&two)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(two[0]), "=r"(two[1])
               : "r"(from)
               : "memory");
}

// total = the sums of a wave less zero points, scaled, and the bias that nothing stands before.
//   rows     the fields of this thread's first row, kRowPitch apart (`StoreLine`)
//   columns  those of its first column
template <bool kZeros, int kRowPitch, int kColumns, typename Sum>
__device__ __forceinline__ void ScaleSums(const Sum (&acc)[kColumns / 2], uint32_t rows,
                                          uint32_t columns, float (&total)[kColumns / 2]) {
  constexpr int kPitch = 4 * kColumns;
  float row_scale[2];
  uint32_t row_zero[2] = {}, row_sum[2] = {}, zero[2] = {}, sum[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t from = rows + 4 * 8 * i;
    row_scale[i] = LoadShared(from);
    if constexpr (!kZeros) continue;
    row_zero[i] = __float_as_uint(LoadShared(from + kRowPitch));
    row_sum[i] = __float_as_uint(LoadShared(from + 2 * kRowPitch));
  }
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const uint32_t from = columns + 4 * 2 * i;
    uint32_t scale[2], bias[2];
    LoadShared2(from, scale), LoadShared2(from + 3 * kPitch, bias);
    if constexpr (kZeros) LoadShared2(from + kPitch, zero), LoadShared2(from + 2 * kPitch, sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = j / 2, column = j % 2;
      Sum corrected = acc[i + j];
      if constexpr (kZeros) {
        corrected = static_cast<Sum>(static_cast<uint32_t>(acc[i + j]) +
                                     row_zero[row] * sum[column] + row_sum[row] * zero[column]);
      }
      // Each step is rounded, as in every other epilogue.
      const float scaled =
          __fmul_rn(static_cast<float>(corrected) * row_scale[row], __uint_as_float(scale[column]));
      total[i + j] = __fadd_rn(scaled, __uint_as_float(bias[column]));
    }
  }
}

// total = the scaled sums of one tile, or zeros without steps.
template <typename L, DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void SumThenScale(const Arguments& a,
                                             float (&total)[L::kWgmmas][kColumns / 2],
                                             uint32_t shared, int32_t steps, uint32_t ctas,
                                             Ring<L::kStages>& ring, Ring<L::kChunks>& chunk) {
  constexpr int kRows = L::kTileRows;
  if (steps == 0) {
#pragma unroll
    for (int w = 0; w < L::kWgmmas; ++w) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) total[w][i] = 0.0f;
    }
    return;
  }
  Sum<kLhs> acc[L::kWgmmas][kColumns / 2];
  MultiplySums<L, kLhs, kRhs, kColumns>(acc, shared, steps, ctas, ring);
  const int32_t consumer_thread = static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads;
  const int32_t row = consumer_thread / kWarpgroupThreads * L::kWgmmas * kWgmmaRows +
                      consumer_thread % kWarpgroupThreads / 32 * kWarpRows +
                      consumer_thread % 32 / 4;
  const uint32_t fields = shared + L::kScalesAt + chunk.stage * L::kChunkBytes;
  const uint32_t rows = fields + 4 * row;
  const uint32_t columns = fields + 4 * kLineFields * kRows + 4 * (consumer_thread % 4 * 2);
  Wait(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) {
    if (IsInt8(kLhs) && a.has_zeros) {
      ScaleSums<true, 4 * kRows, kColumns>(acc[w], rows + 4 * kWgmmaRows * w, columns, total[w]);
    } else {
      ScaleSums<false, 4 * kRows, kColumns>(acc[w], rows + 4 * kWgmmaRows * w, columns, total[w]);
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(shared + L::kChunkEmptyAt + 8 * chunk.stage);
  chunk.Next();
}

}  // namespace jaxfp8::cuda::sm90
