// What routing knows about a GPU. A plain value, so that tests can make one up.

#pragma once

#include <cstddef>
#include <string>

#include "common/status.h"

namespace jaxfp8::cuda {

struct Device {
  int ordinal = 0;
  int compute_capability = 0;  // 10 * major + minor: 80, 86, 89, 90, 100, 120
  int multiprocessors = 0;
  size_t l2_bytes = 0;
  size_t shared_bytes = 0;   // per block, opted in
  bool may_time = false;     // whether a plan may time candidates on it
  int cublaslt_version = 0;  // from cublasLtGetVersion, such as 130100; 0 without the library
};

// 90 as "9.0".
inline std::string CapabilityText(int compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

// Why a device of another compute capability does not do.
inline Status NeedsCapability(int needed, const Device& device) {
  return "it needs compute capability " + CapabilityText(needed) + ", and the device has " +
         CapabilityText(device.compute_capability);
}

// Gets the current device, queried once per process and ordinal.
Status CurrentDevice(Device& device);

}  // namespace jaxfp8::cuda
