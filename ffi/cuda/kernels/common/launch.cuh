// Launches of kernels, and the overlap of two kernels of one call (sm_90 and later).
//
//   first    StartDependents | reads, computes, writes ........ | ends
//   second                     begins, fetches | WaitForPrevious  | reads, writes
//
// The second kernel may fetch data that no kernel of the call writes. It reads the rest, and
// writes, behind `WaitForPrevious`. Every CTA waits. So a kernel ends behind all kernels of the
// call in front of it, and the next one waits for those too.
//
// The first kernel of a call never begins early, so it reads the results of other calls safely. A
// kernel behind a memset or behind a kernel of a library does not begin early either. Loads of what
// the previous kernel wrote are no `__ldg`: that is for data constant while the kernel runs.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace jaxfp8::cuda {

// Lets the next kernel of the call begin once every CTA of this one has.
__device__ __forceinline__ void StartDependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the previous kernel, and for its writes. Does nothing unless this one was
// launched early.
__device__ __forceinline__ void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether a kernel has code for sm_90 or later. Else the driver has translated PTX of an older
// architecture, and the kernel neither waits nor knows clusters.
template <class... Parameters>
cudaError_t IsHopperCode(void (*kernel)(Parameters...), bool& answer) {
  cudaFuncAttributes attributes = {};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  answer = status == cudaSuccess && attributes.ptxVersion >= 90;
  return status;
}

struct LaunchShape {
  dim3 blocks;
  int threads = 0;
  int shared = 0;            // dynamic shared memory of a CTA, in bytes
  dim3 cluster = {1, 1, 1};  // CTAs of a cluster; only sm_90 and later have more than one
  // Whether the kernel may begin before the last operation of the stream ends. That is then a
  // kernel of the same call, and this one calls `WaitForPrevious`.
  bool early = false;
};

// A launch of one kernel.
class KernelLaunch {
 public:
  KernelLaunch(const LaunchShape& shape, cudaStream_t stream) : early_(shape.early) {
    config_.gridDim = shape.blocks;
    config_.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config_.dynamicSmemBytes = static_cast<size_t>(shape.shared);
    config_.stream = stream;
    config_.attrs = attributes_;
    const dim3& cluster = shape.cluster;
    if (cluster.x * cluster.y * cluster.z > 1) {
      Next(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, cluster.z};
    }
  }
  KernelLaunch(const KernelLaunch&) = delete;
  KernelLaunch& operator=(const KernelLaunch&) = delete;

  const cudaLaunchConfig_t& config() const { return config_; }

  template <class... Parameters, class... Given>
  cudaError_t operator()(void (*kernel)(Parameters...), Given&&... given) {
    bool waits = false;
    const cudaError_t status = early_ ? IsHopperCode(kernel, waits) : cudaSuccess;
    if (status != cudaSuccess) return status;
    if (waits) {
      Next(cudaLaunchAttributeProgrammaticStreamSerialization)
          .programmaticStreamSerializationAllowed = 1;
    }
    early_ = false;
    return cudaLaunchKernelEx(&config_, kernel, std::forward<Given>(given)...);
  }

 private:
  cudaLaunchAttributeValue& Next(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& next = attributes_[config_.numAttrs++];
    next.id = id;
    return next.val;
  }

  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[2] = {};
  bool early_;  // as long as it is no attribute
};

}  // namespace jaxfp8::cuda
