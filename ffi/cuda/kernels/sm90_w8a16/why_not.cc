#include <limits>

#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90_w8a16/path.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda::sm90 {
namespace {

constexpr int64_t kMaxScales = std::numeric_limits<int32_t>::max() / 2;

// Of a batch index, of a side whose scales change along K.
double Scales(const Side& side, int64_t lines, int64_t depth) {
  return static_cast<double>(lines) * (static_cast<double>(depth / side.tiles.tile_depth) + 1);
}

// Why 8-bit weights, on the left, and 16-bit activations do not fit the kernel.
Status WhyNotWeights(const Problem& problem) {
  const Side &weights = problem.lhs, &wide = problem.rhs;
  if (wide.dtype == DType::kF32) {
    return "beside 8-bit weights its values have 16 bits, and the operand is float32";
  }
  if (wide.scale && !wide.tiles.ConstantAlongDepth()) {
    return "scales of its 16-bit side have to be constant along the contracted axis";
  }
  const bool varies = (weights.scale || weights.zero_point) && !weights.tiles.ConstantAlongDepth();
  const bool fine = HasFineScales(weights);
  if (fine && Scales(weights, problem.rows, problem.depth) > static_cast<double>(kMaxScales)) {
    return "it counts scales in 32 bits, and there are more";
  }
  if (fine && (weights.zero_point || weights.dtype == DType::kU8)) {
    return "with scales that change every " + std::to_string(weights.tiles.tile_depth) +
           " values its weights are int8 or FP8, without zero points";
  }
  if (varies && !fine && weights.tiles.tile_depth % kMixedDepth != 0) {
    return "scales or zero points of its weights change every " +
           std::to_string(weights.tiles.tile_depth) +
           " values along the contracted axis, but it needs 32 or a multiple of " +
           std::to_string(kMixedDepth);
  }
  if (varies && weights.scale && wide.dtype == DType::kF16) {
    return "beside float16 it has no room for scales that change along the contracted axis: it "
           "multiplies codes by powers of two, which leave the range of float16";
  }
  const TmaOperands operands = OperandsOf(problem);
  if (operands.rhs.copied) {
    return "16-bit values have to be lines of the contracted axis, of a multiple of " +
           std::to_string(kOperandAlignment) + " bytes";
  }
  if (operands.lhs.copied) {
    return "beside 16-bit values lines of weights need a multiple of " +
           std::to_string(kOperandAlignment) + " bytes";
  }
  if (wide.scale && !wide.HasPlainScales()) {
    return "scales of its 16-bit side have to be float32, and are not rounded";
  }
  return {};
}

}  // namespace

bool HasFineScales(const Side& weights) {
  const int64_t depth = weights.tiles.tile_depth;
  return weights.scale && !weights.tiles.ConstantAlongDepth() &&
         (depth == kFineDepth || (depth == kMixedDepth && weights.HasExponents()));
}

Status WhyNotMixed(const Problem& problem) {
  JAXFP8_RETURN_IF_ERROR(WhyNotWeights(WithWeightsOnLeft(problem)));
  const bool groups = problem.grouping != Grouping::kNone;
  if (groups && (!GroupsRows(problem) || !HasWeightsOnRight(problem))) {
    return "groups of 16-bit values have to be rows of lhs, times weights of each group";
  }
  return {};
}

}  // namespace jaxfp8::cuda::sm90
