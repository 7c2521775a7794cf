// How many calls each kernel of a library has computed: they reveal a reference in a fast one's
// place. And the C functions in which a library says what it is.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace jaxfp8 {

// The kernels of a library by number, and their calls.
template <class Kernel, const std::vector<const Kernel*>& (*kAll)()>
class KernelCalls {
 public:
  static int Number() { return static_cast<int>(kAll().size()); }
  static const char* NameOf(int kernel) { return InRange(kernel) ? kAll()[kernel]->name : ""; }
  static uint64_t Of(int kernel) { return InRange(kernel) ? calls_[kernel].load() : 0; }
  static bool InRange(int kernel) { return kernel >= 0 && kernel < Number() && kernel < kMax; }

  static void Count(const Kernel& kernel) {
    for (int i = 0; InRange(i); ++i) {
      if (kAll()[i] == &kernel) calls_[i].fetch_add(1, std::memory_order_relaxed);
    }
  }
  static void Reset() {
    for (auto& count : calls_) count.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr int kMax = 32;
  static inline std::atomic<uint64_t> calls_[kMax] = {};
};

}  // namespace jaxfp8

// Defines the functions that both libraries have (include/jaxfp8_cpu.h, jaxfp8_cuda.h).
//   Calls  the KernelCalls of the library
#define JAXFP8_LIBRARY_FUNCTIONS(platform, Calls)                                           \
  const char* jaxfp8_version() { return JAXFP8_VERSION; }                                   \
  void jaxfp8_ffi_api_version(int* major, int* minor) {                                     \
    *major = XLA_FFI_API_MAJOR;                                                             \
    *minor = XLA_FFI_API_MINOR;                                                             \
  }                                                                                         \
  int jaxfp8_##platform##_kernel_count() { return Calls::Number(); }                        \
  const char* jaxfp8_##platform##_kernel_name(int kernel) { return Calls::NameOf(kernel); } \
  uint64_t jaxfp8_##platform##_kernel_calls(int kernel) { return Calls::Of(kernel); }       \
  void jaxfp8_##platform##_reset_counters() { Calls::Reset(); }
