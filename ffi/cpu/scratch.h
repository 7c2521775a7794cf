// Memory of one thread, kept from call to call: panels of at most a few megabytes.

#ifndef JAXFP8_CPU_SCRATCH_H_
#define JAXFP8_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace jaxfp8 {

class Scratch {
 public:
  // The calling thread's.
  static Scratch& OfThread() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // Makes room for `size` bytes; what was there is lost.
  void Reserve(size_t size) {
    used_ = 0;
    if (size <= size_) return;
    memory_.reset();
    size_ = 0;
    memory_.reset(static_cast<uint8_t*>(::operator new(size, kAlignment)));
    size_ = size;
  }

  template <typename T>
  T* Take(size_t count) {
    T* taken = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += Padded(count * sizeof(T));
    return taken;
  }

  static constexpr size_t Padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(uint8_t* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<uint8_t, Free> memory_;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_SCRATCH_H_
