// The host side of the W8A16 kernel.

#include <utility>

#include "cuda/kernels/sm90/plan.h"
#include "cuda/kernels/sm90_w8a16/kernels.h"
#include "cuda/kernels/sm90_w8a16/path.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda::sm90 {
namespace {

// What `PickBytes` needs of two words of codes for the registers of a fragment: two codes each,
// sign-extended to 16 bits. Codes of a row are neighbours; of lines of N, those of a depth are.
void PickCodes(bool mn_major, uint32_t (&picks)[4]) {
  constexpr uint32_t kRows[4][2] = {{0, 1}, {4, 5}, {2, 3}, {6, 7}};
  constexpr uint32_t kColumns[4][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}};
  for (int i = 0; i < 4; ++i) {
    const auto& [low, high] = mn_major ? kColumns[i] : kRows[i];
    picks[i] = low | (8 | low) << 4 | high << 8 | (8 | high) << 12;
  }
}

// Has the weights on the left, and stores the transposed output.
class MixedPlan final : public HopperPlan {
 public:
  //   problem  with the weights on the left
  //   swapped  whether the sides were exchanged
  MixedPlan(const Problem& problem, bool swapped, const Configuration& configuration,
            const Device& device)
      : HopperPlan(problem, configuration, MakeMixedSchedule(problem, configuration), kMixedDepth,
                   device),
        swapped_(swapped) {}

  Status Run(const Buffers& buffers, cudaStream_t stream) const override {
    return HopperPlan::Run(swapped_ ? Swapped(buffers) : buffers, stream);
  }

 private:
  Kernel KernelOf() const override {
    const DType wide = problem_.rhs.dtype;
    switch (problem_.lhs.dtype) {
      case DType::kE4M3:
        return WeightsKernelFor<DType::kE4M3>(wide, configuration_.tile);
      case DType::kE5M2:
        return WeightsKernelFor<DType::kE5M2>(wide, configuration_.tile);
      default:
        return WeightsKernelFor<DType::kS8>(wide, configuration_.tile);
    }
  }

  Problem Stored() const override { return Swapped(problem_); }

  // Has CTAs share units if the workspace has room for their sums. It holds nothing else then:
  // operands are not copied.
  void UseWorkspace(size_t workspace) override {
    TileSchedule shared = schedule_;
    ShareUnits(problem_, configuration_, multiprocessors_, shared);
    const size_t bytes = SharedUnitsBytes(shared, configuration_.tile, multiprocessors_);
    if (bytes <= workspace) schedule_ = shared, shared_bytes_ = bytes;
  }

  Status Clear(const Buffers& buffers, cudaStream_t stream) const override {
    if (shared_bytes_ == 0) return {};
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, shared_bytes_));
    return CudaError(cudaMemsetAsync(buffers.workspace, 0, ctas_ * kCounterBytes, stream),
                     "cudaMemsetAsync");
  }

  // What is subtracted and scaled in the main loop. Scales that are constant along K follow it.
  void Complete(const Buffers& buffers, Arguments& a) const override {
    a.shared_units = buffers.workspace;
    const Side &lhs = problem_.lhs, &rhs = problem_.rhs;
    Weights& w = a.weights;
    w.dtype = lhs.dtype, w.mn_major = operands_.lhs.mn_major;
    PickCodes(w.mn_major, w.picks);
    w.step_scales = ScalesOf(lhs, buffers.lhs_scale, problem_.rows, schedule_.steps, kMixedDepth);
    if (!lhs.scale && !lhs.zero_point) w.step_scales.steps_per_scale = Divisor(schedule_.steps);
    if (lhs.tiles.ConstantAlongDepth()) {
      w.step_scales.scale = nullptr;
    } else {
      a.lhs_scales.scale = nullptr;
    }
    if (lhs.zero_point) w.zero_point = buffers.lhs_zero_point;
    if (lhs.zero_point || lhs.dtype == DType::kU8) w.terms = RowTerms::kZeros;  // uint8 - 128
    if (w.step_scales.scale) w.terms = RowTerms::kScales;
    if (HasFineScales(lhs)) {
      w.terms = RowTerms::kFine;
      w.fine_depth = static_cast<int32_t>(lhs.tiles.tile_depth);
      w.fine_blocks = static_cast<int32_t>((problem_.depth + w.fine_depth - 1) / w.fine_depth);
    }
    w.values = static_cast<const uint16_t*>(buffers.rhs);
    w.values_batch = operands_.rhs.batches > 1 ? rhs.batch_stride : 0,
    w.values_line = rhs.free_stride;
  }

  bool swapped_;
  size_t shared_bytes_ = 0;  // of the workspace, where CTAs share units
};

}  // namespace

Status MakeMixedPlan(const Problem& problem, const Device& device, size_t workspace,
                     std::unique_ptr<Plan>& plan) {
  const Problem oriented = WithWeightsOnLeft(problem);
  const Configuration configuration = ChooseMixed(oriented, device.multiprocessors);
  auto made =
      std::make_unique<MixedPlan>(oriented, HasWeightsOnRight(problem), configuration, device);
  JAXFP8_RETURN_IF_ERROR(made->Prepare(workspace));
  plan = std::move(made);
  return {};
}

}  // namespace jaxfp8::cuda::sm90
