#include "cpu/counters.h"

#include <atomic>

#include "cpu/route.h"

namespace jaxfp8 {
namespace {

constexpr int kMaxKernels = 32;
std::atomic<uint64_t> calls[kMaxKernels];

}  // namespace

void CountCall(const Kernel& kernel) {
  const auto& all = AllKernels();
  for (size_t i = 0; i < all.size() && i < kMaxKernels; ++i) {
    if (all[i] == &kernel) calls[i].fetch_add(1, std::memory_order_relaxed);
  }
}

uint64_t CallsOf(int kernel) {
  if (kernel < 0 || kernel >= kMaxKernels) return 0;
  return calls[kernel].load(std::memory_order_relaxed);
}

void ResetCalls() {
  for (auto& count : calls) count.store(0, std::memory_order_relaxed);
}

}  // namespace jaxfp8
