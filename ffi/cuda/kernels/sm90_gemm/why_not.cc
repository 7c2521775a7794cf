#include <algorithm>
#include <limits>

#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"

namespace jaxfp8::cuda::sm90 {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max() / 2;
// Strides of a tensor map are below 2^40.
constexpr double kMaxOperandBytes = 0x1p40;

double Size(const Problem& problem, int64_t lines) {
  return static_cast<double>(problem.batch) * static_cast<double>(lines) *
         static_cast<double>(problem.depth + kOperandAlignment);
}

// Why the scales of a side do not fit the steps of the kernel, or "".
std::string WhyNotScales(const Side& side) {
  if (!side.scale || side.tiles.ConstantAlongDepth() || side.tiles.tile_depth % kStepDepth == 0) {
    return "";
  }
  return "its scales change every " + std::to_string(side.tiles.tile_depth) +
         " values along the contracted axis, but it needs a multiple of " +
         std::to_string(kStepDepth);
}

}  // namespace

std::string WhyNot(const Problem& problem, const Device& device) {
  if (!IsFloat8(problem.lhs.dtype) || !IsFloat8(problem.rhs.dtype)) {
    return "it multiplies FP8 by FP8, and the operands are " +
           std::string(NameOf(problem.lhs.dtype)) + " and " +
           std::string(NameOf(problem.rhs.dtype));
  }
  if (device.compute_capability != 90) {
    return "it needs compute capability 9.0, and the device has " +
           std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10);
  }
  if (problem.depth == 0) return "there is nothing to sum";
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    const std::string wrong = WhyNotScales(*side);
    if (!wrong.empty()) return wrong;
  }
  // The smallest tile has 64 x 32 outputs.
  const double units = (static_cast<double>(problem.rows) / 64 + 1) *
                       (static_cast<double>(problem.columns) / 32 + 1) *
                       static_cast<double>(problem.batch);
  const int64_t largest = std::max({problem.batch, problem.rows, problem.columns, problem.depth});
  if (largest > kMaxSize || units > static_cast<double>(kMaxSize)) {
    return "it counts tiles in 32 bits, and the product is larger";
  }
  if (std::max(Size(problem, problem.rows), Size(problem, problem.columns)) >= kMaxOperandBytes) {
    return "it needs operands of less than 1 TiB";
  }
  return "";
}

}  // namespace jaxfp8::cuda::sm90
