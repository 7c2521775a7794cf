// How the tokens of a text are shared among CTAs. Pure host code.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/attention/problem.h"

namespace jaxfp8::cuda::attention {

inline constexpr int kStep = 16;     // tokens that a warp takes at a time
inline constexpr int kTileRows = 8;  // rows of a CTA
inline constexpr int kWarps = 4;     // of a CTA
inline constexpr int kMaxRows = 32;  // each tile of rows reads the cache anew
// Ranks of a cluster combine through shared memory. More parts take a second kernel.
inline constexpr int kMaxInCluster = 8;

// CTAs that an SM holds, as the kernel's launch bounds say.
constexpr int CtasPerSm(DType cache, int64_t width) {
  if (width == 256) return SizeOf(cache) == 1 ? 2 : 1;
  return width * SizeOf(cache) <= 128 ? 4 : 3;
}

struct Schedule {
  int64_t tiles = 1;  // of rows, for each text and head
  int64_t parts = 1;  // CTAs of a tile
  bool cluster = false;
};

// The scratch of one part: for each row of a tile its maximum, its sum and its outputs.
constexpr int64_t PartFloats(int64_t width) { return kTileRows * (width + 2); }

// The schedule of a problem that the kernel can compute.
Schedule ScheduleOf(const AttentionProblem& problem, const Device& device, size_t scratch_bytes);

}  // namespace jaxfp8::cuda::attention
