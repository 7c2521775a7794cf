// What routing knows of a GPU. A plain value, so that tests can make one.

#ifndef JAXFP8_CUDA_DEVICE_H_
#define JAXFP8_CUDA_DEVICE_H_

#include <cstddef>
#include <string>

namespace jaxfp8::cuda {

struct Device {
  int ordinal = 0;
  int compute_capability = 0;  // 10 * major + minor: 80, 86, 89, 90, 100, 120
  int multiprocessors = 0;
  size_t l2_bytes = 0;
  size_t shared_bytes = 0;  // per block, opted in
  bool may_time = false;    // whether a plan may run candidates on it to find the fastest
  int cublaslt_version =
      0;  // as cublasLtGetVersion gives it, such as 130100; 0 without the library
};

// The current device, looked at once per process and ordinal; returns what went wrong, or "".
std::string CurrentDevice(Device& device);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_DEVICE_H_
