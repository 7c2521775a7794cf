// The host side that the Hopper kernels share: copies of operands, arguments, launches.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90/schedule.h"
#include "cuda/path.h"

namespace jaxfp8::cuda::sm90 {

//   depth  of a step
StepScales ScalesOf(const Side& side, const float* scale, int64_t lines, int32_t steps,
                    int64_t depth);

class HopperPlan : public Plan {
 public:
  // Fits the kernel to the device.
  Status Prepare(size_t workspace);
  Status Run(const Buffers& buffers, cudaStream_t stream) const override;

 protected:
  //   depth  of a step
  HopperPlan(const Problem& problem, const Configuration& configuration,
             const TileSchedule& schedule, int32_t depth, const Device& device);

  virtual Kernel KernelOf() const = 0;
  // Sets what the kernel alone has.
  virtual void Complete(const Buffers& buffers, Arguments& arguments) const = 0;
  // The problem whose output the kernel stores: `problem_`, or its transpose.
  virtual Problem Stored() const { return problem_; }
  // Changes the schedule to what the workspace has room for.
  virtual void UseWorkspace(size_t) {}
  // Clears what the kernel counts in.
  virtual Status Clear(const Buffers&, cudaStream_t) const { return {}; }

  Problem problem_;
  Configuration configuration_;
  TileSchedule schedule_;
  int32_t depth_, multiprocessors_, ctas_ = 1;
  TmaOperands operands_;
  Kernel kernel_;

 private:
  Status Map(const TmaOperand& operand, const void* values, const Buffers& buffers, int box_lines,
             CUtensorMap& map) const;
  Status MapOutput(const Arguments& arguments, CUtensorMap& map) const;
  Arguments ArgumentsFor(const Buffers& buffers) const;
  Status Launch(const Buffers& buffers, cudaStream_t stream) const;
};

}  // namespace jaxfp8::cuda::sm90
