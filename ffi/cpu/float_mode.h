// The floating-point mode of the kernels: subnormals kept, round to nearest even.
//
// XLA flushes subnormals in its own threads, but not in all threads it lends. Bits must not depend
// on the thread.

#pragma once

#ifdef JAXFP8_X86
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace jaxfp8 {

// Sets the mode during its lifetime.
class FloatMode {
 public:
#ifdef JAXFP8_X86
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatMode() { _mm_setcsr(before_); }
#else
  FloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&before_); }
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#ifdef JAXFP8_X86
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nothing flushed
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

}  // namespace jaxfp8
