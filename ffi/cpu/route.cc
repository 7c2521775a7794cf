#include "cpu/route.h"

namespace jaxfp8 {
namespace {

bool Integers(const Problem& problem) {
  return IsInt8(problem.lhs.dtype) && IsInt8(problem.rhs.dtype);
}

// bfloat16 holds every value of these types.
bool FitsBFloat16(const Side& side) {
  return (side.dtype == DType::kBF16 || IsEightBit(side.dtype)) && !side.zero_point;
}

std::string Types(const Problem& problem) {
  return std::string(NameOf(problem.lhs.dtype)) + " and " + std::string(NameOf(problem.rhs.dtype));
}

// Why the kernel's sums do not suit the problem; "" if they do.
std::string WhyNotSums(const Kernel& kernel, const Problem& problem) {
  const bool exact = problem.epilogue.out.dtype == DType::kS32;
  switch (kernel.sums) {
    case Sums::kInteger:
      if (!Integers(problem)) return "it sums integers, and the operands are " + Types(problem);
      return "";
    case Sums::kBFloat16:
      if (exact) return "its sums are rounded, and an int32 output needs exact ones";
      if (!FitsBFloat16(problem.lhs) || !FitsBFloat16(problem.rhs)) {
        return "it multiplies bfloat16, which cannot hold " + Types(problem) +
               " less their zero points";
      }
      return "";
    default:
      return exact ? "its sums are rounded, and an int32 output needs exact ones" : "";
  }
}

// Rows for which the kernel is a good choice.
int LeastRows(const Kernel& kernel, const Problem& problem) {
  if (problem.rhs.prepared) return kernel.least.prepared;
  if (kernel.least.along == kernel.least.across) return kernel.least.across;
  const int64_t paid = kDepthOfRow * problem.rows;
  const bool along = problem.rhs.depth.Contiguous() && IsEightBit(problem.rhs.dtype) &&
                     problem.depth >= paid && !ChangesOften(problem, paid);
  return along ? kernel.least.along : kernel.least.across;
}

// Processors with tiles add products of bfloat16 in vectors at half the rate of float32.
bool IsSlow(const Kernel& kernel, unsigned features) {
  return kernel.sums == Sums::kBFloat16 && !(kernel.needs & kAmx) && features & kAmx;
}

// Whether the kernel is a good choice: integers are summed exactly, but where scales change every
// few values of the depth, only a kernel that scales single values is, if it may.
bool Suits(const Kernel& kernel, const Problem& problem, unsigned features) {
  if (!WhyNotSums(kernel, problem).empty() || IsSlow(kernel, features)) return false;
  if (problem.rows < LeastRows(kernel, problem)) return false;
  const bool exact = problem.epilogue.out.dtype == DType::kS32;
  if (!exact && HasShortSegments(problem, kernel.sums)) return kernel.sums == Sums::kFloat32;
  return kernel.sums == Sums::kInteger || !Integers(problem);
}

Route Named(const Problem& problem, unsigned features, std::string_view name) {
  for (const Kernel* kernel : AllKernels()) {
    if (kernel->name != name) continue;
    if (kernel->needs & ~features) {
      return {nullptr, "kernel `" + std::string(name) + "` needs instructions this CPU lacks"};
    }
    const std::string reason = WhyNotSums(*kernel, problem);
    if (!reason.empty()) return {nullptr, "kernel `" + std::string(name) + "` cannot: " + reason};
    return {kernel, ""};
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
    for (const KernelList& list : {
#ifdef JAXFP8_X86
             amx::Kernels(), avx512_vnni::Kernels(), avx512_bf16::Kernels(), avx512_vbmi::Kernels(),
             avx512::Kernels(), avx2::Kernels(),
#endif
             scalar::Kernels()}) {
      for (const Kernel* kernel = list.begin; kernel != list.end; ++kernel) all.push_back(kernel);
    }
    return all;
  }();
  return kernels;
}

Route RouteTo(const Problem& problem, unsigned features, std::string_view name) {
  if (!name.empty()) return Named(problem, features, name);
  for (const Kernel* kernel : AllKernels()) {
    if (!(kernel->needs & ~features) && Suits(*kernel, problem, features)) return {kernel, ""};
  }
  return {nullptr, "no kernel takes " + Types(problem)};
}

}  // namespace jaxfp8
