// The XLA FFI handler `jaxfp8_joint_dots`: several scaled dots as one launch of `sm80_w8a16`.
//
//   attributes  those of each scaled dot, but `kernel`; their names begin with dot0_, dot1_, ...
//               multiplied, optional: the dtype of the product of both outputs, the only result.
//               Each output is rounded to its own dtype first
//   operands    those of the first dot, then those of the second, ...
//   results     likewise

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/xla_call.h"
#include "cuda/device.h"
#include "cuda/kernels/sm80_w8a16/plan.h"
#include "cuda/known_calls.h"
#include "cuda/plans.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

struct KnownJoint {
  std::unique_ptr<w8a16::W8A16Plan> plan;
  std::vector<Slots> dots;
  bool gated = false;
};

// Takes the first `count` of the buffers that are left.
bool Take(const std::vector<Buffer>& from, size_t& taken, size_t count, std::vector<Buffer>& to) {
  if (from.size() - taken < count) return false;
  to.assign(from.begin() + taken, from.begin() + taken + count);
  taken += count;
  return true;
}

// The dots of a call, read one after another.
struct Dots {
  std::string_view multiplied;
  w8a16::Gate gate;
  std::vector<Problem> problems;
  std::vector<Slots> slots;
  size_t operands = 0, results = 0;  // how many are taken

  // Reads and checks the next dot.
  Status Add(Reader read, const std::vector<Buffer>& given_operands,
             const std::vector<Buffer>& given_results) {
    Request request;
    ScaledDotSpec& spec = request.spec;
    Read(read, spec);
    JAXFP8_RETURN_IF_ERROR(read.status());
    if (!multiplied.empty()) JAXFP8_RETURN_IF_ERROR(Multiply(spec.epilogue.out_dtype));
    JAXFP8_RETURN_IF_ERROR(CheckSpec(spec));
    const Slots own = {OperandSlots(spec), ResultSlots(spec)};
    std::vector<Buffer> own_operands, own_results;
    if (!Take(given_operands, operands, own.operands.size(), own_operands) ||
        !Take(given_results, results, own.results.size(), own_results)) {
      return "there are fewer operands or results than its dots need";
    }
    jaxfp8::Buffers buffers;
    JAXFP8_RETURN_IF_ERROR(BindBuffers(spec, own_operands, own_results, Accepts::kScales, buffers));
    request.lhs_scale_type = buffers.lhs_scale_type;
    request.rhs_scale_type = buffers.rhs_scale_type;
    JAXFP8_RETURN_IF_ERROR(MakeProblem(request, problems.emplace_back()));
    slots.push_back(own);
    return {};
  }

 private:
  // Has the next dot write the one result of all.
  //   out_dtype  its own, and then that of the result
  Status Multiply(std::string_view& out_dtype) {
    const DType rounded = ParseDType(out_dtype);
    if (rounded != DType::kF32 && rounded != DType::kBF16 && rounded != DType::kF16) {
      return "outputs that are multiplied are float32, bfloat16 or float16, and one is " +
             std::string(out_dtype);
    }
    gate.rounded[problems.size() % 2] = rounded;
    out_dtype = multiplied;
    results = 0;
    return {};
  }
};

std::string NameOfDot(size_t index) { return "dot" + std::to_string(index) + "_"; }

// Checks a call and makes its plan.
Status Check(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
             const std::vector<Buffer>& results, KnownJoint& known) {
  Dots dots;
  Reader read(attributes);
  if (read.Has("multiplied")) read("multiplied", dots.multiplied);
  JAXFP8_RETURN_IF_ERROR(read.status());
  do {
    JAXFP8_RETURN_IF_ERROR(dots.Add(Reader::WithPrefix(NameOfDot(dots.problems.size()), attributes),
                                    operands, results));
  } while (attributes.contains(NameOfDot(dots.problems.size()) + "lhs_dtype"));
  if (dots.operands != operands.size() || dots.results != results.size()) {
    return "there are more operands or results than its dots need";
  }
  const RelaxedCapture relaxed;
  Device device;
  JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  known.dots = dots.slots;
  known.gated = static_cast<bool>(dots.gate);
  return w8a16::PlanJoint(dots.problems, dots.gate, device, known.plan);
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  const KnownJoint* known = nullptr;
  JAXFP8_RETURN_IF_ERROR(FindCall(attributes, operands, results, Check, known));
  std::vector<Buffers> buffers;
  const Buffer *operand = operands.data(), *result = results.data();
  for (const Slots& dot : known->dots) {
    buffers.push_back(DeviceBuffers(dot.Bind(operand, result)));
    operand += dot.operands.size();
    if (!known->gated) result += dot.results.size();
  }
  JAXFP8_RETURN_IF_ERROR(known->plan->RunAll(buffers, stream));
  Calls::Count(kSm80W8A16);
  return {};
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_joint_dots, jaxfp8::cuda::Call);
