#include "cpu/route.h"

namespace jaxfp8 {
namespace {

bool Integers(const Form& form) { return IsInt8(form.lhs.dtype) && IsInt8(form.rhs.dtype); }

// bfloat16 holds every value of these types.
bool FitsBFloat16(const OperandForm& side) {
  return (side.dtype == DType::kBF16 || IsEightBit(side.dtype)) && !side.zero_point;
}

std::string Types(const Form& form) {
  return std::string(NameOf(form.lhs.dtype)) + " and " + std::string(NameOf(form.rhs.dtype));
}

// Why the kernel's sums do not suit the problem.
Status WhyNotComputeType(const Kernel& kernel, const Form& form) {
  const bool exact = form.out == DType::kS32;
  switch (kernel.compute) {
    case ComputeType::kInt32:
      if (!Integers(form)) return "it sums integers, and the operands are " + Types(form);
      return {};
    case ComputeType::kBFloat16:
      if (exact) return "its sums are rounded, and an int32 output needs exact ones";
      if (!FitsBFloat16(form.lhs) || !FitsBFloat16(form.rhs)) {
        return "it multiplies bfloat16, which cannot hold " + Types(form) +
               " less their zero points";
      }
      return {};
    default:
      return exact ? "its sums are rounded, and an int32 output needs exact ones" : "";
  }
}

// The fewest rows for the kernel.
int MinRowsOf(const Kernel& kernel, const Form& form) {
  const MinRows& min = kernel.min_rows;
  if (form.rhs.prepared) return min.prepared;
  const int64_t deep = kDepthPerRow * form.rows;
  const bool nk = form.rhs.contiguous && IsEightBit(form.rhs.dtype) && form.depth >= deep &&
                  !ChangesOften(form, deep);
  return nk ? min.nk : min.kn;
}

// Processors with tiles add products of bfloat16 in vectors at half the rate of float32.
bool IsSlow(const Kernel& kernel, unsigned features) {
  return kernel.compute == ComputeType::kBFloat16 && !(kernel.needs & kAmx) && features & kAmx;
}

// Whether the kernel is a good choice. Integers are summed exactly. If scales change every few
// values of K, the kernel must scale single values, unless the output must be exact.
bool Suits(const Kernel& kernel, const Form& form, unsigned features) {
  if (!WhyNotComputeType(kernel, form).ok() || IsSlow(kernel, features)) return false;
  if (form.rows < MinRowsOf(kernel, form)) return false;
  const bool exact = form.out == DType::kS32;
  if (!exact && HasShortSegments(form, kernel.compute))
    return kernel.compute == ComputeType::kFloat32;
  return kernel.compute == ComputeType::kInt32 || !Integers(form);
}

Route Named(const Form& form, unsigned features, std::string_view name) {
  for (const Kernel* kernel : AllKernels()) {
    if (kernel->name != name) continue;
    if (kernel->needs & ~features) {
      return {nullptr, "kernel `" + std::string(name) + "` needs instructions this CPU lacks"};
    }
    const Status why_not = WhyNotComputeType(*kernel, form);
    if (why_not.ok()) return {kernel, ""};
    return {nullptr, "kernel `" + std::string(name) + "` cannot: " + why_not.message()};
  }
  std::string known;
  for (const Kernel* kernel : AllKernels())
    known += (known.empty() ? "" : ", ") + std::string(kernel->name);
  return {nullptr, "attribute `kernel` is `" + std::string(name) + "`, but needs one of: " + known};
}

}  // namespace

const std::vector<const Kernel*>& AllKernels() {
  static const std::vector<const Kernel*> kernels = [] {
    std::vector<const Kernel*> all;
#define JAXFP8_KERNELS(isa) isa::Kernels(),
    for (const KernelList& list : {JAXFP8_ISAS(JAXFP8_KERNELS)}) {
#undef JAXFP8_KERNELS
      for (const Kernel* kernel = list.begin; kernel != list.end; ++kernel) all.push_back(kernel);
    }
    return all;
  }();
  return kernels;
}

Route RouteTo(const Form& form, unsigned features, std::string_view name) {
  if (!name.empty()) return Named(form, features, name);
  for (const Kernel* kernel : AllKernels()) {
    if (!(kernel->needs & ~features) && Suits(*kernel, form, features)) return {kernel, ""};
  }
  return {nullptr, "no kernel takes " + Types(form)};
}

}  // namespace jaxfp8
