// The XLA FFI handler `jaxfp8_quantize`, which common/quantize_call.h describes.

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "common/quantize_call.h"
#include "cuda/bind.h"
#include "cuda/kernels/quantize/quantize.h"

namespace jaxfp8::cuda {
namespace {

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  QuantizeProblem problem;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, operands, problem));
  JAXFP8_RETURN_IF_ERROR(QuantizeWhyNot(problem));
  QuantizeBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindBuffers(problem, operands, Describe(rets), true, buffers));
  if (buffers.workspace_bytes < QuantizeWorkspace(problem)) {
    return "the workspace has " + std::to_string(buffers.workspace_bytes) + " bytes, but needs " +
           std::to_string(QuantizeWorkspace(problem));
  }
  return LaunchQuantize(problem, buffers, stream);
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_quantize, jaxfp8::cuda::Call);
