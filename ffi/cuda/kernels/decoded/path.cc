#include "cuda/kernels/decoded/path.h"

#include <memory>
#include <string>
#include <vector>

#include "common/sizes.h"
#include "cuda/cublaslt/attempts.h"
#include "cuda/kernels/pack/pack.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace decoded {
namespace {

constexpr int64_t kAlignment = 256, kLineValues = 8;  // lines of 16 bytes
// Larger products are left to cuBLASLt, which decodes in pieces.
constexpr double kMaxBytes = 256 << 20;
// With more lines `cublaslt_wide` is faster, where it decodes both sides. On an H200 4096^3 in MX
// takes 238 us by it and 308 by this path, 4096 x 8192 x 8192 862 and 1152, and 256 x 4096 x 14336
// 148 and 104.
constexpr double kMaxLines = 512;

// Tensor cores sum FP8 between scales of 128 of K, and integers over all of K.
bool ChangesOften(const Side& side) {
  return VariesAlongDepth(side) && (IsInt8(side.dtype) || side.tiles.tile_depth % 128 != 0);
}

bool FoldsAll(const Problem& problem) {
  const auto folds = [](const Side& side) { return !VariesAlongDepth(side) || FoldsScale(side); };
  return folds(problem.lhs) && folds(problem.rhs);
}

Status WhyNotDecoded(const Problem& problem, const Side& side) {
  const double lines = LinesOf(problem, side);
  if (lines > kMaxLines && FoldsAll(problem)) {
    return "it decodes up to 512 lines of K in MX, and these are " +
           std::to_string(static_cast<int64_t>(lines));
  }
  const double values = lines * static_cast<double>(problem.depth + kLineValues);
  if (2 * values > kMaxBytes) return "it decodes up to 256 MiB";
  if (side.zero_point) return "what it decodes has no zero points";
  if (FoldsScale(side) || !side.scale) return {};
  if (VariesAlongDepth(side) || !side.HasPlainScales()) {
    return "it decodes exactly: scales that change along the contracted axis have to be "
           "float8_e8m0fnu";
  }
  return {};
}

DecodedForm FormWith(const Problem& problem, bool left) {
  DecodedForm form;
  form.left = left, form.product = problem;
  Side& side = left ? form.product.lhs : form.product.rhs;
  form.lines = left ? problem.rows : problem.columns;
  form.batches = side.batch_stride == 0 ? 1 : problem.batch;
  form.pitch = RoundUp(problem.depth, kLineValues);
  form.bytes = static_cast<size_t>(
      RoundUp(form.batches * form.lines * form.pitch * SizeOf(DType::kBF16), kAlignment));
  if (FoldsScale(side)) side = Folded(side);
  side.dtype = DType::kBF16;
  side.free_stride = form.pitch, side.depth_stride = 1;
  side.batch_stride = side.batch_stride == 0 ? 0 : form.lines * form.pitch;
  side.sums = false;
  if (!side.scale) side.tiles = {};
  return form;
}

Status WhyNotProblem(const Problem& problem) {
  if (!IsEightBit(problem.lhs.dtype) || !IsEightBit(problem.rhs.dtype)) {
    return "it decodes one of two 8-bit sides, and the operands are " + TypesOf(problem);
  }
  if (!ChangesOften(problem.lhs) && !ChangesOften(problem.rhs)) {
    return "no scale changes so often along the contracted axis that sums in 8 bits do not fit";
  }
  if (problem.out.dtype == DType::kS32) {
    return "its sums are rounded, and an int32 output needs exact ones";
  }
  return problem.depth == 0 ? "there is nothing to sum" : "";
}

// The paths for 16-bit values beside 8-bit weights, better first. With many rows `sm80_w8a16`
// decodes the weights again and again.
std::vector<const Path*> InOrder(const Problem& product) {
  if (!IsSkinny(product)) return {&kSm90Gemm};
  if (FillsHopper(product)) return {&kSm90Gemm, &kSm80W8A16};
  return {&kSm80W8A16, &kSm90Gemm};
}

class DecodedPlan final : public Plan {
 public:
  DecodedPlan(const Problem& problem, DecodedForm form)
      : side_(form.left ? problem.lhs : problem.rhs), depth_(problem.depth), form_(form) {}

  // Plans the product with what is left of the workspace.
  Status Prepare(const Device& device, size_t workspace) {
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(workspace, form_.bytes));
    const Path* path = PathOf(form_.product, device);
    if (!path) return "no path multiplies what is decoded";
    return path->make_plan(form_.product, device, workspace - form_.bytes, plan_);
  }

  Status Run(const Buffers& given, cudaStream_t stream) const override {
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(given.workspace_bytes, form_.bytes));
    const void* scale = form_.left ? given.lhs_scale : given.rhs_scale;
    PackRequest request;
    request.side = side_;
    request.lines = {0, form_.batches, 0, form_.lines, depth_};
    request.out = DType::kBF16;
    if (FoldsScale(side_)) request.exponents = scale;
    request.count_padded = form_.lines, request.depth_padded = form_.pitch;
    JAXFP8_RETURN_IF_ERROR(
        LaunchPack(request, form_.left ? given.lhs : given.rhs, given.workspace, stream));
    Buffers buffers = given;
    (form_.left ? buffers.lhs : buffers.rhs) = given.workspace;
    if (request.exponents) (form_.left ? buffers.lhs_scale : buffers.rhs_scale) = nullptr;
    buffers.workspace = static_cast<char*>(given.workspace) + form_.bytes;
    buffers.workspace_bytes = given.workspace_bytes - form_.bytes;
    return plan_->Run(buffers, stream);
  }

 private:
  Side side_;  // as it is given
  int64_t depth_;
  DecodedForm form_;
  std::unique_ptr<Plan> plan_;
};

Status WhyNot(const Problem& problem, const Device& device) {
  DecodedForm form;
  JAXFP8_RETURN_IF_ERROR(MakeForm(problem, form));
  if (PathOf(form.product, device)) return {};
  const Path* first = InOrder(form.product).front();
  return "`" + std::string(first->name) +
         "` cannot multiply it: " + first->why_not(form.product, device).message();
}

Status MakePlan(const Problem& problem, const Device& device, size_t workspace,
                std::unique_ptr<Plan>& plan) {
  DecodedForm form;
  JAXFP8_RETURN_IF_ERROR(MakeForm(problem, form));
  auto made = std::make_unique<DecodedPlan>(problem, form);
  JAXFP8_RETURN_IF_ERROR(made->Prepare(device, workspace));
  plan = std::move(made);
  return {};
}

}  // namespace

Status MakeForm(const Problem& problem, DecodedForm& form) {
  JAXFP8_RETURN_IF_ERROR(WhyNotProblem(problem));
  const bool left_first = LinesOf(problem, problem.lhs) <= LinesOf(problem, problem.rhs);
  Status status;
  for (const bool left : {left_first, !left_first}) {
    const Status why_not = WhyNotDecoded(problem, left ? problem.lhs : problem.rhs);
    if (why_not.ok()) {
      form = FormWith(problem, left);
      return {};
    }
    if (status.ok()) status = why_not;
  }
  return status;
}

const Path* PathOf(const Problem& product, const Device& device) {
  for (const Path* path : InOrder(product)) {
    if (path->why_not(product, device).ok()) return path;
  }
  return nullptr;
}

}  // namespace decoded

const Path kDecodedW8A16 = {"decoded_w8a16", decoded::WhyNot, decoded::MakePlan, true};

}  // namespace jaxfp8::cuda
