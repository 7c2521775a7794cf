#include "cuda/plans.h"

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/kept.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

// The bytes of everything that a plan depends on.
Key KeyOf(const Request& request, int ordinal, size_t workspace_bytes) {
  Key key;
  key(ordinal), key(static_cast<int64_t>(workspace_bytes));
  const auto add = [&](const char*, const auto& field) { key(field); };
  EachFieldOfSide(request.spec.lhs, add);
  EachFieldOfSide(request.spec.rhs, add);
  EachFieldOfEpilogue(request.spec.epilogue, add);
  key(request.spec.precision), key(request.kernel);
  for (DType type : {request.lhs_scale_type, request.rhs_scale_type}) {
    key(static_cast<int64_t>(type));
  }
  return key;
}

// One plan is made at a time on each device, so that nothing disturbs timing. Devices do not wait
// for each other: one may need data from the other to go on.
std::mutex& MakingOn(int ordinal) {
  static auto* making = new std::array<std::mutex, 16>;
  return (*making)[ordinal % making->size()];
}

std::atomic<bool> timing_allowed = true;

Status MakePlan(const Request& request, const Device& device, size_t workspace_bytes,
                Planned& planned) {
  JAXFP8_RETURN_IF_ERROR(MakeProblem(request, planned.problem));
  return PlanProblem(device, request.kernel, workspace_bytes, planned);
}

}  // namespace

Status PlanProblem(const Device& device, std::string_view kernel, size_t workspace_bytes,
                   Planned& planned) {
  const Route route = RouteTo(planned.problem, device, kernel);
  if (!route.path) return route.reason;
  const bool named = !kernel.empty();
  std::string reasons;
  const std::vector<Choice> choices =
      named ? std::vector<Choice>{{route.path, {}}} : Choices(planned.problem, device);
  for (const Choice& choice : choices) {
    if (!choice.why_not.ok()) continue;
    planned.path = choice.path;
    const Status status =
        choice.path->make_plan(planned.problem, device, workspace_bytes, planned.plan);
    if (status.ok()) return {};
    reasons += (reasons.empty() ? "" : "; ") + status.In(choice.path->name).message();
  }
  return "no plan: " + reasons;
}

void AllowTiming(bool allowed) { timing_allowed = allowed; }

Status FindPlan(const Request& request, size_t workspace_bytes, const Planned*& planned) {
  int ordinal = 0;
  JAXFP8_RETURN_IF_ERROR(CudaError(cudaGetDevice(&ordinal), "cudaGetDevice"));
  auto& plans = Kept<Planned>::OfProcess();
  const Key key = KeyOf(request, ordinal, workspace_bytes);
  if ((planned = plans.Find(key))) return {};
  const std::lock_guard making(MakingOn(ordinal));
  if ((planned = plans.Find(key))) return {};
  const RelaxedCapture relaxed;
  Device device;
  JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  device.may_time = timing_allowed;
  auto made = std::make_unique<Planned>();
  JAXFP8_RETURN_IF_ERROR(MakePlan(request, device, workspace_bytes, *made));
  planned = plans.Keep(key, std::move(made));
  return {};
}

Buffers DeviceBuffers(const jaxfp8::Buffers& from) {
  Buffers buffers;
#define JAXFP8_TYPED(name) buffers.name = static_cast<decltype(buffers.name)>(from.name);
  JAXFP8_BUFFERS(JAXFP8_TYPED)
#undef JAXFP8_TYPED
  return buffers;
}

Status RunPlan(const Planned& planned, const jaxfp8::Buffers& from, void* workspace,
               size_t workspace_bytes, cudaStream_t stream) {
  Buffers buffers = DeviceBuffers(from);
  buffers.workspace = workspace;
  buffers.workspace_bytes = workspace_bytes;
  const Status status = planned.plan->Run(buffers, stream);
  if (!status.ok()) return status.In("path `" + std::string(planned.path->name) + "`");
  Calls::Count(*planned.path);
  return {};
}

}  // namespace jaxfp8::cuda
