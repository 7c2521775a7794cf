#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda/cublaslt/api.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

std::string Query(int ordinal, Device& device) {
  int major = 0, minor = 0, l2 = 0, shared = 0;
  const std::pair<cudaDeviceAttr, int*> wanted[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMultiProcessorCount, &device.multiprocessors},
      {cudaDevAttrL2CacheSize, &l2},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared},
  };
  for (const auto& [attribute, to] : wanted) {
    const std::string wrong =
        CudaError(cudaDeviceGetAttribute(to, attribute, ordinal), "cudaDeviceGetAttribute");
    if (!wrong.empty()) return wrong;
  }
  device.ordinal = ordinal;
  device.compute_capability = 10 * major + minor;
  device.l2_bytes = l2;
  device.shared_bytes = shared;
  // Other paths work without the library, and the route says what is missing.
  std::string absent;
  const CublasLt* library = OpenCublasLt(absent);
  device.cublaslt_version = library ? library->version : 0;
  return "";
}

}  // namespace

std::string CurrentDevice(Device& device) {
  int ordinal = 0;
  std::string wrong = CudaError(cudaGetDevice(&ordinal), "cudaGetDevice");
  if (!wrong.empty()) return wrong;
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(ordinal);
  if (found != known.end()) {
    device = found->second;
    return "";
  }
  wrong = Query(ordinal, device);
  if (wrong.empty()) known.emplace(ordinal, device);
  return wrong;
}

}  // namespace jaxfp8::cuda
