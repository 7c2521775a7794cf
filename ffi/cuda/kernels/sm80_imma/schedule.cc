#include "cuda/kernels/sm80_imma/schedule.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/sizes.h"

namespace jaxfp8::cuda::imma {
namespace {

constexpr int64_t kMaxColumns = std::numeric_limits<int32_t>::max() / 2;
constexpr int64_t kMaxBatch = 65535;  // of a grid
// An int32 holds the sum of this many products of two codes of at least -128.
constexpr int64_t kMaxDepth = std::numeric_limits<int32_t>::max() / (128 * 128);
// CTAs of this size overlap: while some round their weights, others wait for theirs.
constexpr int kSharedOfThird = 72 << 10;
constexpr int kMinSplitDepth = 512;

int SplitDepth(int64_t depth, int split) {
  return static_cast<int>(DivideUp(DivideUp(depth, kBlockDepth), split) * kBlockDepth);
}

Status WhyNotTypes(const Problem& problem) {
  const DType left = problem.lhs.dtype;
  const bool known = left == DType::kS8 || left == DType::kBF16 || left == DType::kF16;
  if (known && IsFloat8(problem.rhs.dtype)) return {};
  return "it multiplies int8, bfloat16 or float16 by FP8, and the operands are " + TypesOf(problem);
}

Status WhyNotSide(const Side& side) {
  if (side.zero_point) return "it subtracts no zero points";
  if (side.scale && !side.tiles.ConstantAlongDepth()) {
    return "it needs scales that are constant along the contracted axis";
  }
  return {};
}

Status WhyNotSizes(const Problem& problem) {
  if (problem.rows > kMaxRows) {
    return "it takes up to " + std::to_string(kMaxRows) + " rows, and these are " +
           std::to_string(problem.rows);
  }
  if (problem.depth > kMaxDepth) {
    return "an int32 holds the sum of " + std::to_string(kMaxDepth) + " products, and these are " +
           std::to_string(problem.depth);
  }
  if (problem.columns > kMaxColumns || problem.batch > kMaxBatch) {
    return "it counts columns in 32 bits and a batch up to " + std::to_string(kMaxBatch) +
           ", and the product is larger";
  }
  return {};
}

Status WhyNotShared(const Problem& problem, const Device& device) {
  const SplitGrid s = MakeSchedule(problem, device);
  const auto needed = static_cast<size_t>(SharedBytes(s.row_tiles, s.depth));
  if (needed <= device.shared_bytes) return {};
  return "the weights of " + std::to_string(16 * ColumnTiles(s.row_tiles)) +
         " columns have to fit shared memory: " + std::to_string(needed) + " bytes of " +
         std::to_string(device.shared_bytes);
}

}  // namespace

Status WhyNotForm(const Problem& problem) {
  JAXFP8_RETURN_IF_ERROR(WhyNotTypes(problem));
  JAXFP8_RETURN_IF_ERROR(WhyNotSide(problem.lhs));
  JAXFP8_RETURN_IF_ERROR(WhyNotSide(problem.rhs));
  JAXFP8_RETURN_IF_ERROR(WhyNotSizes(problem));
  return problem.out.dtype == DType::kS32 ? "its sums have scales, and an int32 output none" : "";
}

Status WhyNot(const Problem& problem, const Device& device) {
  if (device.compute_capability < 80) return NeedsCapability(80, device);
  const Problem oriented = WithWeightsOnRight(problem);
  JAXFP8_RETURN_IF_ERROR(WhyNotForm(oriented));
  return WhyNotShared(oriented, device);
}

bool HasWeightsOnLeft(const Problem& problem) {
  return IsFloat8(problem.lhs.dtype) && !IsFloat8(problem.rhs.dtype);
}

Problem WithWeightsOnRight(const Problem& problem) {
  return HasWeightsOnLeft(problem) ? Swapped(problem) : problem;
}

int RowTilesFor(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 4; }

SplitGrid MakeSchedule(const Problem& problem, const Device& device) {
  SplitGrid s;
  s.row_tiles = RowTilesFor(problem.rows);
  s.column_tiles = static_cast<int>(DivideUp(problem.columns, 16 * ColumnTiles(s.row_tiles)));
  const int most = device.compute_capability >= 90 ? kMaxSplit : 1;
  const int64_t tiles = problem.batch * s.column_tiles;
  const auto suits = [&] {
    return SharedBytes(s.row_tiles, s.depth) <= kSharedOfThird &&
           (tiles * s.split > device.multiprocessors || s.depth < 2 * kMinSplitDepth);
  };
  s.depth = SplitDepth(problem.depth, 1);
  while (!suits() && s.split < most) {
    s.split *= 2;
    s.depth = SplitDepth(problem.depth, s.split);
  }
  return s;
}

CodesScratch ScratchOf(const Problem& problem) {
  CodesScratch s;
  const int64_t lines = problem.rows * (problem.lhs.batch_stride == 0 ? 1 : problem.batch);
  s.pitch = RoundUp(problem.depth, 16);
  s.scales = static_cast<size_t>(RoundUp(lines * s.pitch, 256));
  s.bytes = s.scales + static_cast<size_t>(4 * lines);
  return s;
}

}  // namespace jaxfp8::cuda::imma
