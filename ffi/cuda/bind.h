// What XLA FFI handlers of the CUDA library share: their binding, and what they answer.

#ifndef JAXFP8_CUDA_BIND_H_
#define JAXFP8_CUDA_BIND_H_

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxfp8::cuda {

// Binds the stream, all operands, all results and all attributes.
inline auto BindAll() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs<xla::ffi::Dictionary>();
}

// The answer to a call: an error that says what is wrong with it, if `run` does. No exception
// leaves this function.
//   name  of the call
//   run   returns what is wrong, or ""
template <class Run>
xla::ffi::Error AnswerOf(const char* name, const Run& run) {
  try {
    const std::string wrong = run();
    return wrong.empty() ? xla::ffi::Error::Success() : xla::ffi::Error::InvalidArgument(wrong);
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal("`" + std::string(name) + "`: " + error.what());
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_BIND_H_
