// The host side of path `sm90_gemm`.

#include <utility>

#include "cuda/kernels/common/element.cuh"
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
    return IsInt8(problem_.lhs.dtype) ? Int8Kernel() : Float8Kernel();
  }

  Kernel Int8Kernel() const {
    return ForTypes<DType::kS8, DType::kU8>(
        [&]<DType kLhs, DType kRhs>() { return SumKernelFor<kLhs, kRhs>(configuration_.tile); });
  }

  Kernel Float8Kernel() const {
    const Scaling scaling = HasBlocks(problem_.rhs) ? Scaling::kBlocks : Scaling::kLines;
    return ForTypes<DType::kE4M3, DType::kE5M2>([&]<DType kLhs, DType kRhs>() {
      if constexpr (kLhs == DType::kE4M3 || kRhs == DType::kE4M3) {
        if (SumsFirst(problem_)) return SumKernelFor<kLhs, kRhs>(configuration_.tile);
      }
      return KernelFor<kLhs, kRhs>(scaling, configuration_.tile);
    });
  }

  // What `kernel` returns for the types of both sides.
  template <DType... kTypes, typename F>
  Kernel ForTypes(F kernel) const {
    return Visit<kTypes...>(problem_.lhs.dtype, Kernel{}, [&]<DType kLhs>() {
      return Visit<kTypes...>(problem_.rhs.dtype, Kernel{}, [&]<DType kRhs>() {
        return kernel.template operator()<kLhs, kRhs>();
      });
    });
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
