// The binding of XLA FFI handlers of the CUDA library.

#ifndef JAXFP8_CUDA_BIND_H_
#define JAXFP8_CUDA_BIND_H_

#include <cuda_runtime_api.h>

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

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_BIND_H_
