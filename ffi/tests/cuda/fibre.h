// A function with a stack of its own, which can pause and be resumed.

#ifndef JAXFP8_TESTS_CUDA_FIBRE_H_
#define JAXFP8_TESTS_CUDA_FIBRE_H_

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace jaxfp8::cuda::simt {

// Tells the address sanitizer which stack is in use from here on.
//   kept  where what it knows of the stack that is left is kept; null if that is never resumed
inline void LeaveFor([[maybe_unused]] void** kept, [[maybe_unused]] const void* stack,
                     [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(kept, stack, bytes);
#endif
}
inline void Arrive([[maybe_unused]] void* kept, [[maybe_unused]] const void** from,
                   [[maybe_unused]] size_t* bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(kept, from, bytes);
#endif
}

class Fibre {
 public:
  Fibre() = default;
  Fibre(const Fibre&) = delete;  // its stack points to it

  void Start(const std::function<void()>& run) {
    run_ = &run;
    stack_ = std::make_unique_for_overwrite<char[]>(kStackBytes);
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get(), own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    makecontext(&own_, Enter, 0);
  }

  // Runs until the function pauses or ends.
  void Resume() {
    void* kept = nullptr;
    running_ = this;
    LeaveFor(&kept, stack_.get(), kStackBytes);
    swapcontext(&caller_, &own_);
    Arrive(kept, nullptr, nullptr);
  }

  // Called by the function: returns to where it was resumed.
  void Pause() {
    void* kept = nullptr;
    LeaveFor(&kept, caller_stack_, caller_bytes_);
    swapcontext(&own_, &caller_);
    Arrive(kept, &caller_stack_, &caller_bytes_);
  }

  bool done() const { return done_; }

 private:
  static constexpr size_t kStackBytes = size_t{128} << 10;

  static void Enter() {
    Fibre& self = *running_;
    Arrive(nullptr, &self.caller_stack_, &self.caller_bytes_);
    (*self.run_)();
    self.done_ = true;
    LeaveFor(nullptr, self.caller_stack_, self.caller_bytes_);
    setcontext(&self.caller_);
  }

  static inline Fibre* running_ = nullptr;
  const std::function<void()>* run_ = nullptr;
  std::unique_ptr<char[]> stack_;
  ucontext_t own_ = {}, caller_ = {};
  const void* caller_stack_ = nullptr;
  size_t caller_bytes_ = 0;
  bool done_ = false;
};

}  // namespace jaxfp8::cuda::simt

#endif  // JAXFP8_TESTS_CUDA_FIBRE_H_
