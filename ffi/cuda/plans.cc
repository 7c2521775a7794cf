#include "cuda/plans.h"

#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "cuda/counters.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

// The bytes of everything that a plan depends on.
class Key {
 public:
  void operator()(int64_t value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void operator()(std::string_view value) {
    (*this)(static_cast<int64_t>(value.size()));
    text_ += value;
  }
  void operator()(Dims values) {
    (*this)(static_cast<int64_t>(values.size()));
    text_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  }
  void operator()(const OperandSpec& side) {
    (*this)(side.dtype);
    for (Dims dims : {side.shape, side.contracting, side.batch, side.tiles}) (*this)(dims);
    (*this)(int64_t{side.scale} + 2 * int64_t{side.zero_point} + 4 * int64_t{side.scale_rounded} +
            8 * int64_t{side.sums});
  }
  void operator()(const EpilogueSpec& e) {
    (*this)(int64_t{e.has_residual} + 2 * int64_t{e.has_bias} + 4 * int64_t{e.has_out_scale} +
            8 * int64_t{e.has_amax});
    for (Dims dims : {e.residual, e.bias, e.out_scale, e.amax}) (*this)(dims);
    for (std::string_view name : {e.residual_dtype, e.activation, e.out_dtype}) (*this)(name);
  }

  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string KeyOf(const Request& request, int ordinal, size_t workspace_bytes) {
  Key key;
  key(ordinal);
  key(static_cast<int64_t>(workspace_bytes));
  key(request.spec.lhs);
  key(request.spec.rhs);
  key(request.spec.epilogue);
  key(request.spec.precision);
  key(request.kernel);
  for (DType type : {request.lhs_scale_type, request.rhs_scale_type}) {
    key(static_cast<int64_t>(type));
  }
  return key.Take();
}

// Never destroyed: a plan may still be running when the process ends.
struct Plans {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<const Planned>> known;
  // One plan is made at a time on each device, so that nothing disturbs timing. Devices do not wait
  // for each other: one may need data from the other to go on.
  std::array<std::mutex, 16> making;
};

Plans& ThePlans() {
  static Plans* plans = new Plans;
  return *plans;
}

const Planned* Known(Plans& plans, const std::string& key) {
  const std::shared_lock lock(plans.mutex);
  const auto found = plans.known.find(key);
  return found == plans.known.end() ? nullptr : found->second.get();
}

std::atomic<bool> timing_allowed = true;

// Makes the plan with the first path that can compute the problem. If that finds no room or no
// algorithm, the next one is tried, unless a path was asked for by name.
Status MakePlan(const Request& request, const Device& device, size_t workspace_bytes,
                Planned& planned) {
  JAXFP8_RETURN_IF_ERROR(MakeProblem(request.spec, planned.problem));
  planned.problem.lhs.scale_type = request.lhs_scale_type;
  planned.problem.rhs.scale_type = request.rhs_scale_type;
  const Route route = RouteTo(planned.problem, device, request.kernel);
  if (!route.path) return route.reason;
  const bool named = !request.kernel.empty();
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

}  // namespace

void AllowTiming(bool allowed) { timing_allowed = allowed; }

Status FindPlan(const Request& request, size_t workspace_bytes, const Planned*& planned) {
  int ordinal = 0;
  JAXFP8_RETURN_IF_ERROR(CudaError(cudaGetDevice(&ordinal), "cudaGetDevice"));
  Plans& plans = ThePlans();
  const std::string key = KeyOf(request, ordinal, workspace_bytes);
  if ((planned = Known(plans, key))) return {};
  const std::lock_guard making(plans.making[ordinal % plans.making.size()]);
  if ((planned = Known(plans, key))) return {};
  const RelaxedCapture relaxed;
  Device device;
  JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  device.may_time = timing_allowed;
  auto made = std::make_unique<Planned>();
  JAXFP8_RETURN_IF_ERROR(MakePlan(request, device, workspace_bytes, *made));
  const std::unique_lock lock(plans.mutex);
  planned = (plans.known[key] = std::move(made)).get();
  return {};
}

Buffers DeviceBuffers(const jaxfp8::Buffers& from) {
  Buffers buffers;
  buffers.lhs = from.lhs;
  buffers.rhs = from.rhs;
  buffers.lhs_scale = static_cast<const float*>(from.lhs_scale);
  buffers.lhs_zero_point = static_cast<const int32_t*>(from.lhs_zero_point);
  buffers.rhs_scale = static_cast<const float*>(from.rhs_scale);
  buffers.rhs_zero_point = static_cast<const int32_t*>(from.rhs_zero_point);
  buffers.lhs_sums = static_cast<const int32_t*>(from.lhs_sums);
  buffers.rhs_sums = static_cast<const int32_t*>(from.rhs_sums);
  buffers.residual = from.residual;
  buffers.bias = static_cast<const float*>(from.bias);
  buffers.out_scale = static_cast<const float*>(from.out_scale);
  buffers.out = from.out;
  buffers.amax = static_cast<float*>(from.amax);
  return buffers;
}

Status RunPlan(const Planned& planned, const jaxfp8::Buffers& from, void* workspace,
               size_t workspace_bytes, cudaStream_t stream) {
  Buffers buffers = DeviceBuffers(from);
  buffers.workspace = workspace;
  buffers.workspace_bytes = workspace_bytes;
  const Status status = planned.plan->Run(buffers, stream);
  if (!status.ok()) return status.In("path `" + std::string(planned.path->name) + "`");
  CountCall(*planned.path);
  return {};
}

}  // namespace jaxfp8::cuda
