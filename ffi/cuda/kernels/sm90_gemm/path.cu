// The host side of path `sm90_gemm`.

#include <utility>

#include "cuda/kernels/sm90/plan.h"
#include "cuda/kernels/sm90_gemm/kernels.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_gemm/schedule.h"
#include "cuda/kernels/sm90_w8a16/path.h"

namespace jaxfp8::cuda {
namespace sm90 {
namespace {

// Whether whole parts of 128 columns have one scale.
bool HasBlocks(const Side& rhs) {
  return !rhs.scale || rhs.tiles.ConstantAlongFree() || rhs.tiles.tile_free % kStepDepth == 0;
}

class GemmPlan final : public HopperPlan {
 public:
  GemmPlan(const Problem& problem, const Configuration& configuration, const Device& device)
      : HopperPlan(problem, configuration, MakeSchedule(problem, configuration), kStepDepth,
                   device) {}

 private:
  Kernel KernelOf() const override {
    const DType lhs = problem_.lhs.dtype, rhs = problem_.rhs.dtype;
    const TileShape tile = configuration_.tile;
    if (IsFloat8(lhs) && SumsFirst(problem_)) return Float8SumsKernel(lhs, rhs, tile);
    const Scaling scaling = HasBlocks(problem_.rhs) ? Scaling::kBlocks : Scaling::kLines;
    switch (lhs) {
      case DType::kS8:
        return S8Kernel(rhs, tile);
      case DType::kU8:
        return U8Kernel(rhs, tile);
      case DType::kE4M3:
        return E4M3Kernel(rhs, scaling, tile);
      default:
        return E5M2Kernel(rhs, scaling, tile);
    }
  }

  void Complete(const Buffers&, Arguments&) const override {}
};

Status MakePlan(const Problem& problem, const Device& device, size_t workspace,
                std::unique_ptr<Plan>& plan) {
  if (IsMixed(problem)) return MakeMixedPlan(problem, device, workspace, plan);
  const Configuration configuration = Choose(problem, device.multiprocessors);
  auto made = std::make_unique<GemmPlan>(problem, configuration, device);
  JAXFP8_RETURN_IF_ERROR(made->Prepare(workspace));
  plan = std::move(made);
  return {};
}

}  // namespace
}  // namespace sm90

const Path kSm90Gemm = {"sm90_gemm", sm90::WhyNot, sm90::MakePlan, true, false, true};

}  // namespace jaxfp8::cuda
