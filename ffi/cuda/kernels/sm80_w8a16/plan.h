// The plan of `sm80_w8a16`: one product, or several of one input in one launch.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "common/status.h"
#include "cuda/device.h"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/path.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::w8a16 {

class W8A16Plan final : public Plan {
 public:
  // Either several problems for one launch (`WhyNotJoint`), or one problem of any kind. Either side
  // may be the 8-bit one. Two may have a gate (`WhyNotGated`).
  W8A16Plan(std::span<const Problem> problems, const Gate& gate, const Device& device,
            size_t workspace);

  // Fits the kernel to the device.
  Status Prepare();

  Status Run(const Buffers& buffers, cudaStream_t stream) const override {
    return RunAll({&buffers, 1}, stream);
  }
  // Computes all problems, each with its buffers; the workspace is that of the first.
  Status RunAll(std::span<const Buffers> buffers, cudaStream_t stream) const;

 private:
  Status CountClusters(Capacity& capacity) const;
  int Shared() const { return SharedBytes(RowFragmentsFor(joint_), HasFineScales(joint_)); }
  Launch LaunchKind() const;
  // The products whose CTAs share a cluster.
  int InCluster() const { return gate_ ? 2 : 1; }
  cudaLaunchConfig_t LaunchOfClusters(int64_t tiles, int split, cudaStream_t stream,
                                      cudaLaunchAttribute& attribute) const;
  Status LaunchMainloop(const JointArguments& parts, cudaStream_t stream) const;
  Status LaunchReduce(const Arguments& arguments, cudaStream_t stream) const;

  std::vector<Problem> problems_;  // rhs is the 8-bit side
  std::vector<bool> swapped_;
  Gate gate_;
  Problem joint_;  // all of them as one
  PartTiles tiles_;
  Device device_;
  size_t workspace_;
  KernelFunction kernel_ = nullptr;
  SplitKSchedule schedule_;
  bool clusters_ = false;  // the CTAs of an output tile are a cluster
};

// Makes a plan for problems in one launch.
Status PlanJoint(std::span<const Problem> problems, const Gate& gate, const Device& device,
                 std::unique_ptr<W8A16Plan>& plan);

}  // namespace jaxfp8::cuda::w8a16
