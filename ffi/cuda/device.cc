#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda/cublaslt/api.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

Status Query(int ordinal, Device& device) {
  int major = 0, minor = 0, l2 = 0, shared = 0;
  const std::pair<cudaDeviceAttr, int*> wanted[] = {
      {cudaDevAttrComputeCapabilityMajor, &major},
      {cudaDevAttrComputeCapabilityMinor, &minor},
      {cudaDevAttrMultiProcessorCount, &device.multiprocessors},
      {cudaDevAttrL2CacheSize, &l2},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared},
  };
  for (const auto& [attribute, to] : wanted) {
    JAXFP8_RETURN_IF_ERROR(
        CudaError(cudaDeviceGetAttribute(to, attribute, ordinal), "cudaDeviceGetAttribute"));
  }
  device.ordinal = ordinal;
  device.compute_capability = 10 * major + minor;
  device.l2_bytes = l2;
  device.shared_bytes = shared;
  // Other paths work without the library, and the route says what is missing.
  const CublasLt* library = nullptr;
  device.cublaslt_version = OpenCublasLt(library).ok() ? library->version : 0;
  return {};
}

}  // namespace

Status CurrentDevice(Device& device) {
  int ordinal = 0;
  JAXFP8_RETURN_IF_ERROR(CudaError(cudaGetDevice(&ordinal), "cudaGetDevice"));
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(ordinal);
  if (found != known.end()) {
    device = found->second;
    return {};
  }
  JAXFP8_RETURN_IF_ERROR(Query(ordinal, device));
  known.emplace(ordinal, device);
  return {};
}

}  // namespace jaxfp8::cuda
