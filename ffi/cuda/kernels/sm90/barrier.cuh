// Barriers in shared memory (mbarrier), and copies of tiles by the tensor memory accelerator (TMA).
// Everything here needs sm_90.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/sm90/block.h"

namespace jaxfp8::cuda::sm90 {

// A barrier is eight bytes of shared memory. It completes a phase when `arrivals` threads have
// arrived and every byte that was announced has been copied. Phases have parity 0, 1, 0, ...

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the cluster and to copies.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void Expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the barrier with the same address in a CTA of the cluster. Orders what this thread
// read before, not what it wrote: a release for the cluster would be a fence of the whole device.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(cta)
      : "memory");
}
// Waits until the phase of this parity is complete.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}
// Waits as `Wait` does, but suspends the thread for up to 10 ms at a time. `Wait` wakes it dozens
// of times a step, which takes issue slots from the consumer warps. For warps that mostly wait.
__device__ __forceinline__ void WaitAsleep(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 10'000'000;
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity), "r"(kNanoseconds)
        : "memory");
  }
}
// Whether this lane is the one that acts for its warp. From this instruction the compiler knows
// that one lane runs what follows, and makes no loop over the lanes around each copy.
__device__ __forceinline__ bool IsElected() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// Releases a stage: to this CTA, and to the other one of the pair.
__device__ __forceinline__ void Release(uint32_t empty, uint32_t ctas) {
  __syncwarp();
  if (threadIdx.x % 32 < ctas) ArriveAt(empty, threadIdx.x % 32);
}

// Waits for the threads of a consumer warpgroup. Barriers are named by constants: a name in a
// register takes all sixteen.
__device__ __forceinline__ void SynchronizeWarpgroup(int32_t warpgroup) {
  if (warpgroup == 0) {
    asm volatile("barrier.sync.aligned 1, 128;" ::: "memory");
  } else {
    asm volatile("barrier.sync.aligned 2, 128;" ::: "memory");
  }
}

// Waits for every thread of the cluster, which orders nothing but barriers.
__device__ __forceinline__ void SynchronizeCluster() { ClusterArriveRelaxed(), ClusterWait(); }

// Copies a box of a tensor map to shared memory; `barrier` counts its bytes. What of the box is
// outside the tensor arrives as zeros.
__device__ __forceinline__ void CopyTile(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                         int32_t k, int32_t line, int32_t batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(line), "r"(batch)
      : "memory");
}
// The same to every CTA of `ctas` (a bit each), at the same addresses.
__device__ __forceinline__ void CopyTileTo(uint16_t ctas, uint32_t to, const CUtensorMap* map,
                                           uint32_t barrier, int32_t k, int32_t line,
                                           int32_t batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(ctas), "r"(k), "r"(line), "r"(batch)
      : "memory");
}
// Copies a box from shared memory to a tensor. What of the box is outside is not stored. The copies
// of a thread before `CommitStores` form a group.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int32_t column,
                                         int32_t row, int32_t batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(column), "r"(row), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups of this thread have read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitForStores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The ring of stages between the producer warpgroup, which loads tiles, and the consumers, which
// multiply them. A stage has two barriers:
//
//   producer   waits for empty   -> announces bytes, copies (TMA) -> full completes by itself
//   consumers  wait for full     -> multiply                      -> arrive at empty

// A stage of the ring, and the parity of its phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Initialises the barriers of a CTA: of stages, and of chunks of scales.
//   ctas  of the cluster
template <typename L>
__device__ __forceinline__ void InitBarriers(uint32_t shared, uint32_t ctas) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      InitBarrier(shared + L::kFullAt + 8 * i, 1);
      InitBarrier(shared + L::kEmptyAt + 8 * i, ctas * L::kConsumerWarps);
      if constexpr (requires { L::kLandedAt; }) InitBarrier(shared + L::kLandedAt + 8 * i, 1);
    }
    for (int i = 0; i < L::kChunks; ++i) {
      InitBarrier(shared + L::kChunkFullAt + 8 * i, kScaleThreads);
      InitBarrier(shared + L::kChunkEmptyAt + 8 * i, L::kConsumerWarps);
    }
    FenceBarrierInit();
  }
}

// Copies a tile of an operand, lines of K, into a stage. Of a pair of CTAs that share it each
// copies half for both.
//   kBytes, kLines  of the tile
template <int kBytes, int kLines>
__device__ __forceinline__ void CopyOperand(bool shares, uint32_t to, const CUtensorMap* map,
                                            uint32_t full, int32_t k, int32_t line, int32_t batch,
                                            int32_t rank) {
  if (shares) {
    CopyTileTo(3, to + rank * (kBytes / 2), map, full, k, line + rank * (kLines / 2), batch);
  } else {
    CopyTile(to, map, full, k, line, batch);
  }
}

// Waits until every stage is empty. The other CTA of a pair arrives at barriers of this one, which
// must not be gone by then.
//   empty  the barrier of the first stage
template <int kStages>
__device__ __forceinline__ void DrainRing(Ring<kStages> ring, uint32_t empty) {
  for (int i = 0; i < kStages; ++i, ring.Next()) {
    WaitAsleep(empty + 8 * ring.stage, ring.parity ^ 1);
  }
}

}  // namespace jaxfp8::cuda::sm90
