// The XLA FFI handler of the scaled dot. Its first call makes the plan, also while XLA captures a
// graph. There is no handler for initialising: XLA would call it before every run of a program,
// which costs 5 us for each product.

#include <cuda_runtime_api.h>

#include <exception>
#include <new>
#include <string>

#include "common/check.h"
#include "common/xla_call.h"
#include "cuda/bind.h"
#include "cuda/known_calls.h"
#include "cuda/path.h"
#include "cuda/plans.h"

namespace jaxfp8::cuda {
namespace {

struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The workspace is the last result. Memory from XLA's scratch allocator would be reused while a
// captured graph still points to it.
std::string TakeWorkspace(std::vector<Buffer>& results, Workspace& workspace) {
  if (results.empty() || results.back().dtype != DType::kU8 || results.back().shape.size() != 1) {
    return "`jaxfp8_scaled_dot`: the last result is not the workspace, but on CUDA needs to be: a "
           "vector of uint8";
  }
  workspace = {results.back().data, static_cast<size_t>(results.back().shape[0])};
  results.pop_back();
  return "";
}

struct KnownCall {
  const Planned* planned;
  Slots slots;
};

// Never destroyed: a program may still run when the process ends.
KnownCalls<KnownCall>& TheCalls() {
  static auto* calls = new KnownCalls<KnownCall>;
  return *calls;
}

// Checks a call, finds or makes its plan, and keeps both under the key.
const KnownCall* Check(const CallKey& key, ffi::Dictionary attributes,
                       const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                       size_t workspace_bytes, std::string& wrong) {
  Request request;
  wrong = Read(attributes, request);
  if (wrong.empty()) wrong = CheckSpec(request.spec);
  jaxfp8::Buffers buffers;
  if (wrong.empty()) {
    wrong = BindBuffers(request.spec, operands, results, Accepts::kScales, buffers);
  }
  if (!wrong.empty()) return nullptr;
  request.lhs_scale_type = buffers.lhs_scale_type;
  request.rhs_scale_type = buffers.rhs_scale_type;
  const Planned* planned = FindPlan(request, workspace_bytes, wrong);
  if (!planned) return nullptr;
  return TheCalls().Keep(key.text(),
                         {planned, {OperandSlots(request.spec), ResultSlots(request.spec)}});
}

std::string Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  int device = 0;
  std::string wrong = CudaError(cudaGetDevice(&device), "cudaGetDevice");
  if (!wrong.empty()) return wrong;
  const CallKey key(device, attributes, operands, results);
  const KnownCall* known = TheCalls().Find(key.text());
  Workspace workspace;
  wrong = TakeWorkspace(results, workspace);
  if (!wrong.empty()) return wrong;
  if (!known) {
    known = Check(key, attributes, operands, results, workspace.bytes, wrong);
    if (!known) return wrong;
  }
  return RunPlan(*known->planned, known->slots.Bind(operands.data(), results.data()),
                 workspace.data, workspace.bytes, stream);
}

// No exception leaves this function.
ffi::Error Execute(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  try {
    const std::string wrong = Call(stream, args, rets, attributes);
    return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "`jaxfp8_scaled_dot`: no host memory for a plan");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("`jaxfp8_scaled_dot`: ") + error.what());
  }
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_scaled_dot(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_scaled_dot, jaxfp8::cuda::Execute, jaxfp8::cuda::BindAll(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
