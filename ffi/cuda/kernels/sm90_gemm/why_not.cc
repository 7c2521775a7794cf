#include <algorithm>
#include <limits>

#include "cuda/kernels/sm90/operands.h"
#include "cuda/kernels/sm90/schedule.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_w8a16/path.h"

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

// Tiles of 64 x 32, the smallest.
double TilesOf(const Problem& problem) {
  const double batch = static_cast<double>(problem.batch);
  const double down = static_cast<double>(problem.rows) / 64;
  const double across = static_cast<double>(problem.columns) / 32 + 1;
  return (GroupsRows(problem) ? down + 2 * batch : (down + 1) * batch) * across;
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

// Why 8-bit sides do not fit the kernel.
Status WhyNotSides(const Problem& problem, bool integers) {
  if (!problem.lhs.HasPlainScales() || !problem.rhs.HasPlainScales()) {
    return "it reads scales of float32 alone, and does not round them, but for weights beside "
           "16-bit values";
  }
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    JAXFP8_RETURN_IF_ERROR(integers ? WhyNotZeros(*side, problem.depth) : WhyNotScales(*side));
  }
  const bool zeros = problem.lhs.zero_point || problem.rhs.zero_point;
  if (problem.grouping != Grouping::kNone && zeros) return "groups cannot have zero points";
  return {};
}

}  // namespace

bool SumsFirst(const Problem& problem) {
  const Side &lhs = problem.lhs, &rhs = problem.rhs;
  if (IsInt8(lhs.dtype) && IsInt8(rhs.dtype)) return true;
  const auto varies = [](const Side& side) {
    return side.scale && !side.tiles.ConstantAlongDepth();
  };
  const bool has_code = lhs.dtype == DType::kE4M3 || rhs.dtype == DType::kE4M3;
  return IsFloat8(lhs.dtype) && IsFloat8(rhs.dtype) && has_code && !problem.highest &&
         !varies(lhs) && !varies(rhs);
}

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
           TypesOf(problem);
  }
  if (device.compute_capability != 90) return NeedsCapability(90, device);
  if (problem.depth == 0) return "there is nothing to sum";
  JAXFP8_RETURN_IF_ERROR(mixed ? WhyNotMixed(problem) : WhyNotSides(problem, integers));
  if (problem.grouping != Grouping::kNone) JAXFP8_RETURN_IF_ERROR(WhyNotGroups(problem));
  if (problem.out.dtype == DType::kS32) return "it has no int32 output";
  return WhyNotSizes(problem);
}

}  // namespace jaxfp8::cuda::sm90
