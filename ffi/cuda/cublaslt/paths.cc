#include "cuda/cublaslt/paths.h"

#include <limits>

namespace jaxfp8::cuda {
namespace {

// The requirements that all three paths share.
Status WhyNotDevice(const Device& device, int compute_capability) {
  if (device.compute_capability < compute_capability)
    return NeedsCapability(compute_capability, device);
  if (device.cublaslt_version == 0) {
    return "it needs libcublasLt.so.13, which was not found; install it with `pip install "
           "\"jax[cuda13]\"`";
  }
  return {};
}

Status WhyNotLayout(const Problem& problem, const Device& device, const ProductTypes& types) {
  if (problem.depth == 0) return "there is nothing to sum";
  Status status;
  for (const Attempt& attempt : Attempts(problem, device)) {
    Layout layout;
    constexpr size_t kAnyWorkspace = std::numeric_limits<int64_t>::max();
    status = MakeLayout(problem, types, attempt, kAnyWorkspace, layout);
    if (status.ok()) break;
  }
  return status;
}

ProductTypes Fp8Types(const Problem& problem) {
  return {problem.lhs.dtype, problem.rhs.dtype, DType::kF32};
}

Status WhyNotFp8(const Problem& problem, const Device& device) {
  if (!IsFloat8(problem.lhs.dtype) || !IsFloat8(problem.rhs.dtype)) {
    return "it multiplies FP8 by FP8, and the operands are " + TypesOf(problem);
  }
  if (problem.lhs.dtype == DType::kE5M2 && problem.rhs.dtype == DType::kE5M2) {
    return "no tensor core multiplies float8_e5m2 by float8_e5m2";
  }
  JAXFP8_RETURN_IF_ERROR(WhyNotDevice(device, 89));
  return WhyNotLayout(problem, device, Fp8Types(problem));
}

Status PlanFp8(const Problem& problem, const Device& device, size_t workspace,
               std::unique_ptr<Plan>& plan) {
  return PlanProduct(problem, device, Fp8Types(problem), workspace, plan);
}

constexpr ProductTypes kInt8Types{DType::kS8, DType::kS8, DType::kS32};

Status WhyNotInt8(const Problem& problem, const Device& device) {
  if (!IsInt8(problem.lhs.dtype) || !IsInt8(problem.rhs.dtype)) {
    return "it multiplies int8 or uint8 on both sides, and the operands are " + TypesOf(problem);
  }
  JAXFP8_RETURN_IF_ERROR(WhyNotDevice(device, 80));
  return WhyNotLayout(problem, device, kInt8Types);
}

Status PlanInt8(const Problem& problem, const Device& device, size_t workspace,
                std::unique_ptr<Plan>& plan) {
  return PlanProduct(problem, device, kInt8Types, workspace, plan);
}

// float16 if a side is float16, else bfloat16. Both hold every value of every 8-bit type.
ProductTypes WideTypes(const Problem& problem) {
  const bool half = problem.lhs.dtype == DType::kF16 || problem.rhs.dtype == DType::kF16;
  const DType type = half ? DType::kF16 : DType::kBF16;
  return {type, type, DType::kF32};
}

Status WhyNotWideTypes(const Problem& problem) {
  const DType type = WideTypes(problem).lhs;
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    if (side->HasPlainScales() || !side->scale) continue;
    if (type != DType::kBF16 || !FoldsScale(*side)) {
      return "it reads scales of float32, or folds exponents into codes that it decodes to "
             "bfloat16";
    }
  }
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    if (!IsEightBit(side->dtype) && side->dtype != type) {
      return "it multiplies in 16 bits, which do not hold both " + TypesOf(problem);
    }
    if (side->zero_point) {
      return "it multiplies in 16 bits, which do not hold every value less its zero point";
    }
  }
  if (problem.out.dtype == DType::kS32) {
    return "its sums are rounded, and an int32 output needs exact ones";
  }
  return {};
}

Status WhyNotWide(const Problem& problem, const Device& device) {
  JAXFP8_RETURN_IF_ERROR(WhyNotWideTypes(problem));
  JAXFP8_RETURN_IF_ERROR(WhyNotDevice(device, 80));
  return WhyNotLayout(WithFoldedScales(problem), device, WideTypes(problem));
}

Status PlanWide(const Problem& problem, const Device& device, size_t workspace,
                std::unique_ptr<Plan>& plan) {
  return PlanProduct(WithFoldedScales(problem), device, WideTypes(problem), workspace, plan);
}

}  // namespace

const Path kCublasLtFp8{"cublaslt_fp8", WhyNotFp8, PlanFp8};
const Path kCublasLtInt8{"cublaslt_int8", WhyNotInt8, PlanInt8};
const Path kCublasLtWide{"cublaslt_wide", WhyNotWide, PlanWide, true};

bool LibraryMayTake(const Problem& problem) {
  const bool floats = IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype);
  const bool integers = IsInt8(problem.lhs.dtype) && IsInt8(problem.rhs.dtype);
  return floats || integers || WhyNotWideTypes(problem).ok();
}

}  // namespace jaxfp8::cuda
