#include <algorithm>
#include <limits>

#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_gemm/schedule.h"

namespace jaxfp8::cuda::sm90 {
namespace {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max() / 2;
// Terms up to which sums of products fit int32: of values up to 128, or up to 255, as uint8 has,
// and int8 less a zero point in its range.
constexpr int64_t kMaxSum = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxSummedDepth = kMaxSum / (128 * 128),
                  kMaxCorrectedDepth = kMaxSum / (255 * 255);
// Strides of a tensor map are below 2^40.
constexpr double kMaxOperandBytes = 0x1p40;

double Size(const Problem& problem, const Side& side, int64_t lines) {
  return static_cast<double>(side.batch_stride == 0 ? 1 : problem.batch) *
         static_cast<double>(lines) * static_cast<double>(problem.depth + kOperandAlignment);
}

// Of a batch index, of a side whose scales change along K.
double Scales(const Side& side, int64_t lines, int64_t depth) {
  return static_cast<double>(lines) * (static_cast<double>(depth / side.tiles.tile_depth) + 1);
}

// Tiles of 64 x 32, the smallest.
double TilesOf(const Problem& problem) {
  const double batch = static_cast<double>(problem.batch);
  const double down = static_cast<double>(problem.rows) / 64;
  const double across = static_cast<double>(problem.columns) / 32 + 1;
  return (GroupsRows(problem) ? down + 2 * batch : (down + 1) * batch) * across;
}

// Why groups do not fit the kernel that multiplies these types.
Status WhyNotGroupsOf(const Problem& problem) {
  if (problem.grouping == Grouping::kNone) return {};
  if (!IsMixed(problem)) {
    if (problem.lhs.zero_point || problem.rhs.zero_point) return "groups cannot have zero points";
  } else if (!GroupsRows(problem) || !HasWeightsOnRight(problem)) {
    return "groups of 16-bit values have to be rows of lhs, times weights of each group";
  }
  return WhyNotGroups(problem);
}

// Why the scales of a side do not fit the steps of the kernel.
Status WhyNotScales(const Side& side) {
  if (!side.scale || side.tiles.ConstantAlongDepth() || side.tiles.tile_depth % kStepDepth == 0) {
    return {};
  }
  return "its scales change every " + std::to_string(side.tiles.tile_depth) +
         " values along the contracted axis, but it needs a multiple of " +
         std::to_string(kStepDepth);
}

// Why the scales and zero points of a side do not fit sums over all of K.
Status WhyNotZeros(const Side& side, int64_t depth) {
  if ((side.scale || side.zero_point) && !side.tiles.ConstantAlongDepth()) {
    return "it sums int8 over all of the contracted axis, and scales or zero points change along "
           "it";
  }
  const bool wide = side.zero_point || side.dtype == DType::kU8;
  const int64_t most = wide ? kMaxCorrectedDepth : kMaxSummedDepth;
  if (depth <= most) return {};
  return "it sums int8 in 32 bits, which hold every sum of up to " + std::to_string(most) +
         " products, and the contracted axis has " + std::to_string(depth);
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
  if (fine && Scales(weights, problem.rows, problem.depth) > static_cast<double>(kMaxSize)) {
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
  const Operands operands = OperandsOf(problem);
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

Status WhyNotSizes(const Problem& problem) {
  const double units = TilesOf(problem);
  const int64_t largest = std::max({problem.batch, problem.rows, problem.columns, problem.depth});
  if (largest > kMaxSize || units > static_cast<double>(kMaxSize)) {
    return "it counts tiles in 32 bits, and the product is larger";
  }
  if (std::max(Size(problem, problem.lhs, problem.rows),
               Size(problem, problem.rhs, problem.columns)) >= kMaxOperandBytes) {
    return "it needs operands of less than 1 TiB";
  }
  return {};
}

Status WhyNot(const Problem& problem, const Device& device) {
  const bool integers = IsInt8(problem.lhs.dtype) && IsInt8(problem.rhs.dtype);
  const bool mixed = IsMixed(problem);
  if (!integers && !mixed && !(IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype))) {
    return "it multiplies FP8 by FP8, int8 or uint8 on both sides, or 16 bits by 8, and the "
           "operands are " +
           std::string(NameOf(problem.lhs.dtype)) + " and " +
           std::string(NameOf(problem.rhs.dtype));
  }
  if (device.compute_capability != 90) return NeedsCapability(90, device);
  if (problem.depth == 0) return "there is nothing to sum";
  if (mixed) {
    JAXFP8_RETURN_IF_ERROR(WhyNotWeights(WithWeightsOnLeft(problem)));
  } else if (!problem.lhs.HasPlainScales() || !problem.rhs.HasPlainScales()) {
    return "it reads scales of float32 alone, and does not round them, but for weights beside "
           "16-bit values";
  }
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    if (mixed) break;
    JAXFP8_RETURN_IF_ERROR(integers ? WhyNotZeros(*side, problem.depth) : WhyNotScales(*side));
  }
  JAXFP8_RETURN_IF_ERROR(WhyNotGroupsOf(problem));
  if (problem.out.dtype == DType::kS32) return "it has no int32 output";
  return WhyNotSizes(problem);
}

}  // namespace jaxfp8::cuda::sm90
