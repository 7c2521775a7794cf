// The plans of this process: each problem is planned once per device, and run from then on.
//
// They are kept here and not in an FFI state, whose type would have to be registered under a
// protocol that changed from release to release of JAX, and which serialised programs and callers
// without XLA do not have. A call finds its plan by its attributes in about a microsecond.

#ifndef JAXFP8_CUDA_PLANS_H_
#define JAXFP8_CUDA_PLANS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "common/check.h"
#include "common/spec.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

struct Planned {
  Problem problem;
  const Path* path = nullptr;
  std::unique_ptr<const Plan> plan;
};

// The plan of a request on the current device if there is one already, else null.
const Planned* KnownPlan(const Request& request, size_t workspace_bytes);

// Finds or makes the plan of an accepted request on the current device; null with `wrong` set
// where there is none. What it returns lives as long as the process. `stream` is where it will run:
// nothing is timed for a plan that is first asked for while that is being captured.
const Planned* FindPlan(const Request& request, size_t workspace_bytes, cudaStream_t stream,
                        std::string& wrong);

// Whether new plans may time candidates; they may unless told otherwise.
void AllowTiming(bool allowed);

// Runs a plan on the buffers of a call, and counts it.
std::string RunPlan(const Planned& planned, const jaxfp8::Buffers& buffers, void* workspace,
                    size_t workspace_bytes, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_PLANS_H_
