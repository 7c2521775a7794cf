// The XLA FFI handler of the scaled dot. Its first call makes the plan, also while XLA captures a
// graph. There is no handler for initialising: XLA would call it before every run of a program,
// which costs 5 us for each product.

#include <cuda_runtime_api.h>

#include <vector>

#include "common/buffer_taker.h"
#include "common/check.h"
#include "common/xla_call.h"
#include "cuda/known_calls.h"
#include "cuda/path.h"
#include "cuda/plans.h"

namespace jaxfp8::cuda {
namespace {

struct KnownCall {
  const Planned* planned = nullptr;
  Slots slots;
};

// Of the workspace, the last result. Memory from XLA's scratch allocator would be reused while a
// captured graph still points to it.
size_t BytesOf(const Buffer& workspace) { return static_cast<size_t>(workspace.shape[0]); }

// Checks a call, and finds or makes its plan.
Status Check(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
             const std::vector<Buffer>& all_results, KnownCall& known) {
  if (all_results.empty() || !IsWorkspace(all_results.back())) return kNoWorkspace;
  const std::vector<Buffer> results(all_results.begin(), all_results.end() - 1);
  Request request;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, request));
  JAXFP8_RETURN_IF_ERROR(CheckSpec(request.spec));
  jaxfp8::Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindBuffers(request.spec, operands, results, Accepts::kScales, buffers));
  request.lhs_scale_type = buffers.lhs_scale_type;
  request.rhs_scale_type = buffers.rhs_scale_type;
  known.slots = {OperandSlots(request.spec), ResultSlots(request.spec)};
  return FindPlan(request, BytesOf(all_results.back()), known.planned);
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  const KnownCall* known = nullptr;
  JAXFP8_RETURN_IF_ERROR(FindCall(attributes, operands, results, Check, known));
  const Buffer& workspace = results.back();
  return RunPlan(*known->planned, known->slots.Bind(operands.data(), results.data()),
                 workspace.data, BytesOf(workspace), stream);
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_scaled_dot, jaxfp8::cuda::Call);
