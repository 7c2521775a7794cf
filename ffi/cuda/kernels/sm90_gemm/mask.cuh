// The masking warp of a CTA, where the contracted axis comes in groups. A step has 128 values of
// a line, and the first and the last step of a group may have values of other groups. The warp
// waits until such a stage has landed, and sets these values to zero on both sides, since zero
// times NaN is NaN. Then the stage is full.
//
//   line of a stage   | o o o x x x x x x o |    x: of the group    o: of others, set to zero

#pragma once

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm90_gemm/load.cuh"

namespace jaxfp8::cuda::sm90 {

// The bytes of a word from `first` on.
__device__ __forceinline__ uint32_t BytesFrom(int32_t first) {
  return first <= 0 ? ~0u : first >= 4 ? 0u : ~0u << 8 * first;
}

// Zeros in bytes outside [first, end) of swizzled lines of 128 bytes; by a warp, of which each
// thread has every 32nd line.
template <int kLines>
__device__ __forceinline__ void MaskLines(uint32_t lines, int32_t first, int32_t end) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t byte = 0; byte < kStepDepth; byte += 16) {
    if (first <= byte && end >= byte + 16) continue;
    const uint32_t at = lines + lane * kStepDepth + (byte ^ lane % 8 * 16);
    if (first >= byte + 16 || end <= byte) {
#pragma unroll
      for (int i = 0; i < kLines / 32; ++i) StoreShared4(at + i * 32 * kStepDepth, 0, 0, 0, 0);
      continue;
    }
    uint32_t kept[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept[i] = BytesFrom(first - byte - 4 * i) & ~BytesFrom(end - byte - 4 * i);
    }
#pragma unroll 2
    for (int i = 0; i < kLines / 32; ++i) {
      const int4 v = LoadInts(at + i * 32 * kStepDepth);
      StoreShared4(at + i * 32 * kStepDepth, v.x & kept[0], v.y & kept[1], v.z & kept[2],
                   v.w & kept[3]);
    }
  }
}

template <typename L>
__device__ void MaskTiles(const Arguments& a, uint32_t shared, Parts<false> parts, int32_t rank) {
  Ring<L::kStages> ring;
  uint32_t parities = 0;  // of the landed barriers, a bit each: few stages land
  GroupCursor cursor;
  Part part;
  TileBounds tile;
#pragma unroll 1
  while (NextTile<L>(a, parts, rank, cursor, part, tile)) {
#pragma unroll 1
    for (int32_t step = part.first; step < part.end; ++step, ring.Next()) {
      if (!tile.depth.Cuts(step)) continue;
      const int32_t first = tile.depth.first - step * kStepDepth;
      const int32_t end = tile.depth.end - step * kStepDepth;
      WaitAsleep(shared + L::kLandedAt + 8 * ring.stage, parities >> ring.stage & 1);
      parities ^= 1u << ring.stage;
      MaskLines<L::kTileRows>(shared + L::kLhsAt + ring.stage * L::kLhsBytes, first, end);
      MaskLines<L::kTileColumns>(shared + L::kRhsAt + ring.stage * L::kRhsBytes, first, end);
      FenceAsyncProxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(shared + L::kFullAt + 8 * ring.stage);
    }
  }
}

}  // namespace jaxfp8::cuda::sm90
