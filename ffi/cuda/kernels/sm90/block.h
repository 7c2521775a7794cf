// Sizes that the Hopper kernels share: warpgroups, wgmma tiles, staging, shared memory.

#pragma once

namespace jaxfp8::cuda::sm90 {

inline constexpr int kWarpgroupThreads = 128;  // of a warpgroup, the threads that issue a wgmma
inline constexpr int kWgmmaRows = 64;          // rows of one wgmma
inline constexpr int kScaleThreads = 64;       // of the producer warpgroup
// A warp's rows of a wave, and how many bytes of them it stages for the epilogue at a time.
inline constexpr int kWarpRows = 16, kStagedBytes = 128;
// From row to row, in bytes. The padding spreads rows over the banks: for stores of 16 bytes of
// eight rows, and of 32 bytes of four rows.
inline constexpr int kNarrowPitch = kStagedBytes + 16, kWidePitch = kStagedBytes + 32;
// A warpgroup stores boxes of a wave x 64 columns of 16 bits (TMA).
inline constexpr int kBoxColumns = 64, kBoxBytes = kBoxColumns * kStagedBytes;
// Bytes in which a consumer warp keeps what it knows of its tile (groups.cuh).
inline constexpr int kKeptBytes = 32;
inline constexpr int kMaxSharedBytes = 227 << 10;
inline constexpr int kMaxStages = 16;
inline constexpr int kTileAlignment = 1024;  // of swizzled tiles
// Registers of a thread, which the warpgroups share out anew: 128 threads that load need few, so
// that 256 threads can keep the accumulators of a tile.
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

}  // namespace jaxfp8::cuda::sm90
