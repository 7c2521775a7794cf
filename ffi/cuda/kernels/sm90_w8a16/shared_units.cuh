// The sums of tiles that several CTAs have parts of (schedule.h).
//
//   workspace   counters [CTAs][4]                    two for consumer warpgroups, 0 at first
//               sums     [CTAs][2][registers][128]    what a thread of the warpgroup has, four
//                                                     registers at a time
//
// A CTA leaves the sums of at most one part, its first. So the sums that a tile still needs are
// there, or about to be, when the CTA that finishes it is done with its last part. CTAs wait
// for smaller numbers alone, which start no later. Sums are added in one order, so the bits are the
// same in every run.

#pragma once

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90/barrier.cuh"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda::sm90 {

// The counter and the sums of a warpgroup.
template <typename L>
struct SharedSums {
  static constexpr int kFours = L::kWgmmas * L::kTileColumns / 8;  // of a thread

  uint32_t* counter;
  float4* sums;  // of this thread

  __device__ __forceinline__ SharedSums(const Arguments& a, int32_t cta, int32_t warpgroup) {
    auto* counters = static_cast<char*>(a.shared_units);
    counter = reinterpret_cast<uint32_t*>(counters + cta * kCounterBytes) + warpgroup;
    sums = reinterpret_cast<float4*>(counters + gridDim.x * kCounterBytes) +
           (int64_t{cta} * 2 + warpgroup) * kFours * kWarpgroupThreads +
           threadIdx.x % kWarpgroupThreads;
  }

  __device__ __forceinline__ void Store(const float (&acc)[L::kWgmmas][L::kTileColumns / 2],
                                        int32_t warpgroup) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float* four = &acc[i / (kFours / L::kWgmmas)][i % (kFours / L::kWgmmas) * 4];
      __stcg(sums + i * kWarpgroupThreads, make_float4(four[0], four[1], four[2], four[3]));
    }
    SynchronizeWarpgroup(warpgroup);
    if (threadIdx.x % kWarpgroupThreads == 0) {
      __threadfence();  // for what all of them have stored before the barrier
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
  }

  __device__ __forceinline__ void Add(float (&acc)[L::kWgmmas][L::kTileColumns / 2],
                                      int32_t warpgroup) const {
    if (threadIdx.x % kWarpgroupThreads == 0) {
      uint32_t there = 0;
      while (there == 0) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
      }
    }
    SynchronizeWarpgroup(warpgroup);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 four = __ldcg(sums + i * kWarpgroupThreads);
      float* to = &acc[i / (kFours / L::kWgmmas)][i % (kFours / L::kWgmmas) * 4];
      to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
    }
  }
};

// Leaves the sums of a part for the CTA that finishes its tile, or adds up what others have left.
// Returns whether this CTA finishes it.
template <typename L>
__device__ __forceinline__ bool ShareSums(const Arguments& a, const Part& part,
                                          float (&acc)[L::kWgmmas][L::kTileColumns / 2],
                                          int32_t warpgroup) {
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (part.first > 0) {
    SharedSums<L>(a, cta, warpgroup).Store(acc, warpgroup);
    return false;
  }
  int32_t left = a.schedule.steps - part.end;
#pragma unroll 1
  for (int32_t other = cta - 1; left > 0; --other, left -= a.schedule.share) {
    SharedSums<L>(a, other, warpgroup).Add(acc, warpgroup);
  }
  return true;
}

}  // namespace jaxfp8::cuda::sm90
