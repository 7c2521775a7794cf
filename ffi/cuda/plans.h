// The plans of this process. Each problem is planned once per device.
//
// They are not kept in an FFI state. Its type would have to be registered by a protocol that
// changes between releases of JAX, and serialised programs and C callers have no state.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>

#include "common/check.h"
#include "common/spec.h"
#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

struct Planned {
  Problem problem;
  const Path* path = nullptr;
  std::unique_ptr<Plan> plan;
};

// Finds or makes the plan of an accepted request on the current device. The plan lives as long as
// the process.
Status FindPlan(const Request& request, size_t workspace_bytes, const Planned*& planned);

// Plans `planned.problem` with the first path that can compute it. If that finds no room or no
// algorithm, the next one is tried.
//   kernel  the only path to try; "" for any
Status PlanProblem(const Device& device, std::string_view kernel, size_t workspace_bytes,
                   Planned& planned);

// Whether new plans may time candidates. True at first.
void AllowTiming(bool allowed);

// Lets this thread call the driver while a stream is being captured, that of the call included:
// XLA captures a program when it first runs. Candidates are timed on a stream of their own, which
// waits for none and is not captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The buffers of a call as paths take them, without a workspace.
Buffers DeviceBuffers(const jaxfp8::Buffers& buffers);

// Runs a plan on the buffers of a call, and counts it.
Status RunPlan(const Planned& planned, const jaxfp8::Buffers& buffers, void* workspace,
               size_t workspace_bytes, cudaStream_t stream);

}  // namespace jaxfp8::cuda
