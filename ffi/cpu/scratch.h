// Memory of one thread, kept from call to call: panels of at most a few megabytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, size)
#define ASAN_UNPOISON_MEMORY_REGION(from, size)
#endif

namespace jaxfp8 {

class Scratch {
 public:
  // The calling thread's.
  static Scratch& OfThread() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // Makes room for `size` bytes; the previous contents are lost.
  void Reserve(size_t size) {
    ASAN_POISON_MEMORY_REGION(memory_.get(), used_);
    used_ = 0;
    Grow(size + kMaxAllocations * kGap);
  }

  template <typename T>
  T* Take(size_t count) {
    T* taken = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += Padded(count * sizeof(T)) + kGap;
    ASAN_UNPOISON_MEMORY_REGION(taken, count * sizeof(T));
    return taken;
  }

  static constexpr size_t Padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  // A gap behind each piece for AddressSanitizer: it reports accesses past the end.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGap = 256;
#else
  static constexpr size_t kGap = 0;
#endif
  static constexpr size_t kMaxAllocations = 8;
  static constexpr std::align_val_t kAlignment{64};

  void Grow(size_t size) {
    if (size <= size_) return;
    memory_.reset();
    size_ = 0;
    memory_.reset(static_cast<uint8_t*>(::operator new(size, kAlignment)));
    size_ = size;
    ASAN_POISON_MEMORY_REGION(memory_.get(), size_);
  }

  struct Free {
    void operator()(uint8_t* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace jaxfp8
