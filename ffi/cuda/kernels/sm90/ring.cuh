// The ring of stages between the producer warpgroup, which loads tiles, and the consumers, which
// multiply them. A stage has two barriers:
//
//   producer   waits for empty   -> announces bytes, copies (TMA) -> full completes by itself
//   consumers  wait for full     -> multiply                      -> arrive at empty

#pragma once

#include "cuda/kernels/sm90/barrier.cuh"
#include "cuda/kernels/sm90/block.h"

namespace jaxfp8::cuda::sm90 {

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
