// The C functions of include/jaxfp8/jaxfp8.h for CUDA.

#include "common/abi.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/plans.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

Status ReadProblem(const jaxfp8_scaled_dot_spec* spec, Request& request, Problem& problem) {
  JAXFP8_RETURN_IF_ERROR(ReadRequest(spec, request));
  return MakeProblem(request, problem);
}

Status Explain(const jaxfp8_scaled_dot_spec* spec, int compute_capability, int cublaslt_version,
               std::string& text) {
  Request request;
  Problem problem;
  JAXFP8_RETURN_IF_ERROR(ReadProblem(spec, request, problem));
  const Device device = SmallestDevice(compute_capability, cublaslt_version);
  for (const Choice& choice : Choices(problem, device, request.kernel)) {
    text += (text.empty() ? "" : "\n") + std::string(choice.path->name);
    if (!choice.why_not.ok()) text += ": " + choice.why_not.message();
  }
  return RouteTo(problem, device, request.kernel).reason;
}

Status Compute(const jaxfp8_scaled_dot_spec* spec, const jaxfp8_scaled_dot_buffers* from,
               cudaStream_t stream) {
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadRequest(spec, request));
  jaxfp8::Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(ReadBuffers(from, request.spec, buffers));
  const Planned* planned = nullptr;
  JAXFP8_RETURN_IF_ERROR(FindPlan(request, from->workspace_bytes, planned));
  return RunPlan(*planned, buffers, from->workspace, from->workspace_bytes, stream);
}

Status Prepare(const jaxfp8_scaled_dot_spec* spec, size_t workspace_bytes) {
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadRequest(spec, request));
  const Planned* planned = nullptr;
  return FindPlan(request, workspace_bytes, planned);
}

Status Workspace(const jaxfp8_scaled_dot_spec* spec, int compute_capability,
                 size_t* workspace_bytes) {
  if (!workspace_bytes) return "`workspace_bytes` is null, but needs the address of a size_t";
  Request request;
  Problem problem;
  JAXFP8_RETURN_IF_ERROR(ReadProblem(spec, request, problem));
  *workspace_bytes = WorkspaceFor(problem, request.kernel, compute_capability);
  return {};
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" {

int jaxfp8_cuda_scaled_dot(const jaxfp8_scaled_dot_spec* spec,
                           const jaxfp8_scaled_dot_buffers* buffers, void* stream, char* message,
                           size_t size) {
  return jaxfp8::Answer(message, size, [&] {
    return jaxfp8::cuda::Compute(spec, buffers, static_cast<cudaStream_t>(stream));
  });
}

int jaxfp8_cuda_prepare(const jaxfp8_scaled_dot_spec* spec, size_t workspace_bytes, char* message,
                        size_t size) {
  return jaxfp8::Answer(message, size,
                        [&] { return jaxfp8::cuda::Prepare(spec, workspace_bytes); });
}

int jaxfp8_cuda_workspace(const jaxfp8_scaled_dot_spec* spec, int compute_capability,
                          size_t* workspace_bytes, char* message, size_t size) {
  return jaxfp8::Answer(message, size, [&] {
    return jaxfp8::cuda::Workspace(spec, compute_capability, workspace_bytes);
  });
}

int jaxfp8_cuda_route(const jaxfp8_scaled_dot_spec* spec, int compute_capability,
                      int cublaslt_version, char* text, size_t size) {
  std::string lines;
  const int status = jaxfp8::Answer(text, size, [&] {
    return jaxfp8::cuda::Explain(spec, compute_capability, cublaslt_version, lines);
  });
  if (!lines.empty()) jaxfp8::WriteText(lines, text, size);
  return status;
}

}  // extern "C"

#pragma GCC visibility pop
