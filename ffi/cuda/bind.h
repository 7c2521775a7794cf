// The XLA FFI handlers of the CUDA library.

#pragma once

#include <cuda_runtime_api.h>

#include "common/xla_call.h"

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

// Defines a handler that answers with the status of `Call`, given all that `BindAll` binds. It can
// be captured into CUDA graphs.
#define JAXFP8_CUDA_HANDLER(name, Call) \
  JAXFP8_HANDLER(name, Call, jaxfp8::cuda::BindAll(), {xla::ffi::Traits::kCmdBufferCompatible})
