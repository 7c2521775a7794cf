#include "cuda/counters.h"

#include <atomic>

#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

#define JAXFP8_ONE(symbol, name) +1
constexpr int kPaths = JAXFP8_CUDA_PATHS(JAXFP8_ONE);
#undef JAXFP8_ONE
std::atomic<uint64_t> calls[kPaths];

}  // namespace

void CountCall(const Path& path) {
  const auto& all = AllPaths();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] == &path) calls[i].fetch_add(1, std::memory_order_relaxed);
  }
}

uint64_t CallsOf(int path) {
  if (path < 0 || path >= kPaths) return 0;
  return calls[path].load(std::memory_order_relaxed);
}

void ResetCalls() {
  for (auto& count : calls) count.store(0, std::memory_order_relaxed);
}

}  // namespace jaxfp8::cuda
