// The XLA FFI handler `jaxfp8_quantize`, which common/quantize_call.h describes.

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "common/quantize_call.h"
#include "cuda/bind.h"
#include "cuda/kernels/quantize/quantize.h"

namespace jaxfp8::cuda {
namespace {

std::string Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  QuantizeProblem problem;
  std::string wrong = Read(attributes, operands, problem);
  if (!wrong.empty()) return wrong;
  wrong = QuantizeWhyNot(problem);
  if (!wrong.empty()) return SayQuantize(wrong);
  QuantizeBuffers buffers;
  wrong = BindBuffers(problem, operands, Describe(rets), true, buffers);
  if (!wrong.empty()) return wrong;
  if (buffers.workspace_bytes < QuantizeWorkspace(problem)) {
    return SayQuantize("the workspace has " + std::to_string(buffers.workspace_bytes) +
                       " bytes, but needs " + std::to_string(QuantizeWorkspace(problem)));
  }
  return LaunchQuantize(problem, buffers, stream);
}

ffi::Error Quantize(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  return AnswerOf("jaxfp8_quantize", [&] { return Call(stream, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_quantize(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize, jaxfp8::cuda::Quantize, jaxfp8::cuda::BindAll(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
