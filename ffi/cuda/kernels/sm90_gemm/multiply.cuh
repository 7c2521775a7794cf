// The main loop of a consumer warpgroup, where sums are scaled every 128 of K.
//
//   stage in shared memory                          registers of a warpgroup
//   lhs  wave 0, 64 rows x 128 --+  4 x wgmma         acc     one wave: the sum of 128 of K
//        wave 1, 64 rows x 128 --+  of K = 32           |
//   rhs  N columns x 128 --------+------------------->  v  * scales[row, part of the columns]
//                                                     total   every wave: the scaled sum
//
// While one warpgroup scales and adds up, the other one's wgmma keeps the tensor cores busy. No
// barrier makes them take turns: with one, products were slower.

#pragma once

#include "cuda/kernels/sm90/wgmma.cuh"
#include "cuda/kernels/sm90_gemm/load.cuh"

namespace jaxfp8::cuda::sm90 {

// acc = a wave of lhs * rhs, over the 128 of K of a stage; enqueued and not waited for.
//   lhs, rhs  low words of descriptors
template <DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void MultiplyStage(float (&acc)[kColumns / 2], uint32_t lhs,
                                              uint32_t rhs) {
  constexpr int kDescriptorStep = 32 >> 4;
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kStepDepth / 32; ++i) {
    Wgmma<kLhs, kRhs, kColumns>(acc, DescriptorOf(lhs + i * kDescriptorStep),
                                DescriptorOf(rhs + i * kDescriptorStep), i > 0);
  }
  WgmmaCommit();
}

// total += acc * the scales of a stage.
//   rows     scales of this thread's two rows of the wave
//   parts    scales of the tile's parts, where columns share them
//   columns  where the scales of the columns lie, where they do not
template <typename L, int kColumns>
__device__ __forceinline__ void AddScaled(float (&total)[kColumns / 2],
                                          const float (&acc)[kColumns / 2], const float (&rows)[2],
                                          const float (&parts)[L::kParts], uint32_t columns) {
  if constexpr (L::kScaleColumns > 1) {
#pragma unroll
    for (int part = 0; part < L::kParts; ++part) {
      const float scales[2] = {rows[0] * parts[part], rows[1] * parts[part]};
#pragma unroll
      for (int i = 0; i < L::kScaleColumns / 2; ++i) {
        const int at = part * L::kScaleColumns / 2 + i;
        total[at] += acc[at] * scales[i % 4 / 2];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 4) {
      const uint32_t first = columns + kLineBytes * (2 * i + threadIdx.x % 4 * 2);
      const float two[2] = {LoadShared(first), LoadShared(first + kLineBytes)};
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i + j] += acc[i + j] * (rows[j / 2] * two[j % 2]);
    }
  }
}

// The scales that a thread needs of a step: of its rows of each wave, and of the tile's parts.
template <typename L>
struct ThreadScales {
  float rows[L::kWgmmas][2], parts[L::kParts];

  //   first    the first row's in the chunk, at this step
  //   columns  the first column's
  __device__ __forceinline__ void Load(uint32_t first, uint32_t columns) {
#pragma unroll
    for (int i = 0; i < 2 * L::kWgmmas; ++i) {
      rows[i / 2][i % 2] = LoadShared(first + kLineBytes * (i / 2 * kWgmmaRows + i % 2 * 8));
    }
#pragma unroll
    for (int i = 0; i < L::kParts; ++i) parts[i] = LoadShared(columns + kLineBytes * i);
  }
};

// The scaled sums of one tile. The chain from one wgmma to the next limits a warpgroup, so what a
// wave needs besides is computed while its wgmma run.
template <typename L, DType kLhs, DType kRhs, int kColumns>
__device__ __forceinline__ void MultiplyScaled(float (&total)[L::kWgmmas][kColumns / 2],
                                               uint32_t shared, int32_t steps, uint32_t ctas,
                                               Ring<L::kStages>& ring, Ring<L::kChunks>& chunk) {
  constexpr int kRows = L::kTileRows, kWgmmaBytes = kWgmmaRows * kStepDepth;
  const int32_t consumer_thread = static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads;
  const int32_t warpgroup = consumer_thread / kWarpgroupThreads;
  // This thread's row of the first wave.
  const int32_t row = warpgroup * L::kWgmmas * kWgmmaRows +
                      consumer_thread % kWarpgroupThreads / 32 * kWarpRows +
                      consumer_thread % 32 / 4;
  const uint32_t first_lhs = __shfl_sync(
      ~0u, DescriptorWord(shared + L::kLhsAt + warpgroup * L::kWgmmas * kWgmmaBytes), 0);
  const uint32_t first_rhs = __shfl_sync(~0u, DescriptorWord(shared + L::kRhsAt), 0);
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) total[w][i] = 0.0f;
  }
#pragma unroll(kChunkSteps)
  for (int32_t step = 0; step < steps; ++step) {
    const uint32_t lhs = first_lhs + ring.stage * (L::kLhsBytes >> 4);
    const uint32_t rhs = first_rhs + ring.stage * (L::kRhsBytes >> 4);
    const uint32_t empty = shared + L::kEmptyAt + 8 * ring.stage;
    const uint32_t scales =
        shared + L::kScalesAt + chunk.stage * L::kChunkBytes + step % kChunkSteps * 4;
    const uint32_t columns = scales + kLineBytes * kRows;
    Wait(shared + L::kFullAt + 8 * ring.stage, ring.parity);
    if (!L::kStageHasScales && step % kChunkSteps == 0) {
      Wait(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
    }
    ring.Next();
    ThreadScales<L> of_thread;
#pragma unroll
    for (int w = 0; w < L::kWgmmas; ++w) {
      float acc[kColumns / 2];
      PinAccumulators(acc);
      MultiplyStage<kLhs, kRhs, kColumns>(acc, lhs + w * (kWgmmaBytes >> 4), rhs);
      PinAccumulators(acc);
      if (w == 0) {
        // Only one group is pending, so this returns at once. It keeps the assembler from loading
        // scales between the four wgmma, which then would be issued too late.
        WgmmaWait<1>();
        PinAccumulators(acc);
        of_thread.Load(scales + kLineBytes * row, columns);
      }
      WgmmaWait<0>();
      PinAccumulators(acc);
      if (w == L::kWgmmas - 1) Release(empty, ctas);
      AddScaled<L, kColumns>(total[w], acc, of_thread.rows[w], of_thread.parts, columns);
    }
    if (step % kChunkSteps == kChunkSteps - 1 || step == steps - 1) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(shared + L::kChunkEmptyAt + 8 * chunk.stage);
      chunk.Next();
    }
  }
}

}  // namespace jaxfp8::cuda::sm90
