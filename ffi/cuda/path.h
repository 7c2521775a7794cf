// What a path is: a way to compute a problem on a GPU. The table of all is in route.cc.

#ifndef JAXFP8_CUDA_PATH_H_
#define JAXFP8_CUDA_PATH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// A problem made ready for one device. Made once, outside stream capture; run many times, from
// several threads and streams at once.
class Plan {
 public:
  virtual ~Plan() = default;
  // Enqueues the work and returns what went wrong, or "". Allocates nothing, waits for nothing.
  virtual std::string Run(const Buffers& buffers, cudaStream_t stream) const = 0;
};

struct Path {
  const char* name;
  // Why the path cannot compute the problem on the device; "" if it can. Pure.
  std::string (*why_not)(const Problem&, const Device&);
  // A plan that needs at most `workspace` bytes; null with `wrong` set where that fails.
  std::unique_ptr<Plan> (*plan)(const Problem&, const Device&, size_t workspace,
                                std::string& wrong);
};

// "`what` failed: cudaErrorInvalidValue (invalid argument)", or "" for success.
std::string CudaError(cudaError_t status, const char* what);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_PATH_H_
