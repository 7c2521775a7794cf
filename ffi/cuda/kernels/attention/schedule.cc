#include "cuda/kernels/attention/schedule.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace jaxfp8::cuda {
namespace {

bool IsAligned(const CacheStrides& strides, DType cache) {
  const int64_t per = 16 / SizeOf(cache);
  return strides.text % per == 0 && strides.head % per == 0 && strides.token % per == 0;
}

}  // namespace

Status AttentionWhyNot(const AttentionProblem& p, const Device& device) {
  if (device.compute_capability < 80) return NeedsCapability(80, device);
  if (p.width != 64 && p.width != 128 && p.width != 256) {
    return "heads have " + std::to_string(p.width) + " values, not 64, 128 or 256";
  }
  if (p.cache != DType::kBF16 && p.cache != DType::kE4M3 && p.cache != DType::kS8) {
    return "the cache is " + std::string(NameOf(p.cache)) + ", not bfloat16, float8_e4m3fn or int8";
  }
  if (p.out != DType::kBF16 && p.out != DType::kF32) {
    return "the output is " + std::string(NameOf(p.out)) + ", not bfloat16 or float32";
  }
  if (p.rows > attention::kMaxRows) {
    return "there are " + std::to_string(p.rows) +
           " rows for a head of the cache; it takes up to " + std::to_string(attention::kMaxRows);
  }
  if (p.tokens < 1 || p.tokens >> 30) return "the cache has no token, or 2^30 and more";
  if (!IsAligned(p.keys, p.cache) || !IsAligned(p.values, p.cache)) {
    return "vectors of the cache do not begin at multiples of 16 bytes";
  }
  return {};
}

namespace attention {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Schedule ScheduleOf(const AttentionProblem& p, const Device& device, size_t scratch_bytes) {
  // Times in steps of a warp: what a CTA takes beside its own, and a second kernel.
  constexpr int64_t kStart = 3, kSecondKernel = 4;
  Schedule best;
  best.tiles = CeilDiv(p.rows, kTileRows);
  const int64_t pairs = p.texts * p.heads * best.tiles, steps = CeilDiv(p.tokens, kStep);
  const int64_t slots = int64_t{device.multiprocessors} * CtasPerSm(p.cache, p.width);
  const int64_t in_cluster = device.compute_capability >= 90 ? kMaxInCluster : 1;
  const int64_t in_scratch = static_cast<int64_t>(scratch_bytes / sizeof(float)) /
                             std::max<int64_t>(1, pairs * PartFloats(p.width));
  const int64_t most = std::min(CeilDiv(steps, kWarps), std::max(in_scratch, in_cluster));
  int64_t least = INT64_MAX;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const bool cluster = parts > 1 && parts <= in_cluster;
    // Clusters leave slots empty: 16 texts of 2048 tokens with 8 heads took 33 us in clusters of 3
    // and 40 in clusters of 4, which would fill an H200 (35 in pairs, 53 alone).
    const int64_t waves = CeilDiv(pairs * parts, cluster ? slots * 3 / 4 : slots);
    const int64_t second = parts > 1 && !cluster ? kSecondKernel : 0;
    const int64_t time = waves * (CeilDiv(steps, parts * kWarps) + kStart) + second;
    if (time < least) least = time, best.parts = parts, best.cluster = cluster;
  }
  return best;
}

}  // namespace attention
}  // namespace jaxfp8::cuda
