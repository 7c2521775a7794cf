#include "cuda/kernels/sm80_imma/schedule.h"

#include <limits>

#include "cuda/kernels/sm80_imma/layout.h"

namespace jaxfp8::cuda::imma {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max() / 2;
constexpr int64_t kMaxBatch = 65535;  // of a grid
// An int32 holds the sum of so many products of two codes of at least -128.
constexpr int64_t kMaxDepth = std::numeric_limits<int32_t>::max() / (128 * 128);
// Chosen without a GPU: a split fills the pipeline at least once.
constexpr int64_t kMinTilesPerSplit = kStages;
constexpr int64_t kBlocksPerMultiprocessor = 2;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

size_t Aligned(int64_t bytes) { return static_cast<size_t>(Ceil(bytes, 256) * 256); }

size_t ScaleBytes(const Problem& problem, const Side& side, int64_t lines) {
  if (side.dtype == DType::kS8) return 0;
  return Aligned(4 * lines * (side.batch_stride == 0 ? 1 : problem.batch));
}

int64_t TileRows(const Problem& problem) { return 16 * RowFragmentsFor(problem); }

Status WhyNotTypes(const Problem& problem) {
  const DType left = problem.lhs.dtype;
  const bool known =
      left == DType::kS8 || left == DType::kE4M3 || left == DType::kBF16 || left == DType::kF16;
  if (known && IsFloat8(problem.rhs.dtype)) return {};
  return "it multiplies int8, float8_e4m3fn, bfloat16 or float16 by FP8, and the operands are " +
         std::string(NameOf(left)) + " and " + std::string(NameOf(problem.rhs.dtype));
}

Status WhyNotSide(const Side& side) {
  if (side.zero_point) return "it subtracts no zero points";
  if (side.scale && !side.tiles.ConstantAlongDepth()) {
    return "it needs scales that are constant along the contracted axis";
  }
  return {};
}

Status WhyNotSizes(const Problem& problem) {
  if (problem.depth > kMaxDepth) {
    return "an int32 holds the sum of " + std::to_string(kMaxDepth) + " products, and these are " +
           std::to_string(problem.depth);
  }
  const bool fits = std::max(problem.rows, problem.columns) <= kMaxCount - 8;
  if (!fits || problem.batch > kMaxBatch ||
      Ceil(problem.rows, 16) > kMaxCount / std::max<int64_t>(1, Ceil(problem.columns, 128))) {
    return "it counts tiles in 32 bits and a batch up to " + std::to_string(kMaxBatch) +
           ", and the product is larger";
  }
  return {};
}

}  // namespace

Status WhyNotForm(const Problem& problem) {
  for (const Status& status : {WhyNotTypes(problem), WhyNotSide(problem.lhs),
                               WhyNotSide(problem.rhs), WhyNotSizes(problem)}) {
    if (!status.ok()) return status;
  }
  return problem.out.dtype == DType::kS32 ? "its sums have scales, and an int32 output none" : "";
}

Status WhyNot(const Problem& problem, const Device& device) {
  if (device.compute_capability < 80) {
    return "it needs compute capability 8.0, and the device has " +
           std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10);
  }
  return WhyNotForm(WithWeightsOnRight(problem));
}

bool HasWeightsOnLeft(const Problem& problem) {
  return IsFloat8(problem.lhs.dtype) && !IsFloat8(problem.rhs.dtype);
}

Problem WithWeightsOnRight(const Problem& problem) {
  return HasWeightsOnLeft(problem) ? Swapped(problem) : problem;
}

int RowFragmentsFor(const Problem& problem) { return problem.rows <= 16 ? 1 : 4; }

int64_t PitchOf(const Problem& problem) { return Ceil(problem.columns, 8) * 8; }

Scratch ScratchOf(const Problem& problem) {
  Scratch s;
  s.lhs_scales = ScaleBytes(problem, problem.lhs, problem.rows);
  s.rhs_steps = 2 * s.lhs_scales;
  s.rhs_scales = s.rhs_steps + ScaleBytes(problem, problem.rhs, problem.columns);
  s.sums = 2 * s.rhs_scales - s.rhs_steps;
  return s;
}

size_t BestWorkspace(const Problem& problem) {
  return ScratchOf(problem).sums +
         static_cast<size_t>(4 * problem.batch * problem.rows * PitchOf(problem));
}

Piece LargestPiece(const Problem& problem, size_t workspace) {
  const size_t sums = ScratchOf(problem).sums;
  const auto row_bytes = static_cast<size_t>(4 * PitchOf(problem));
  const auto most = static_cast<size_t>(problem.batch * problem.rows);
  const size_t fit = workspace < sums ? 0 : (workspace - sums) / row_bytes;
  const auto rows = static_cast<int64_t>(std::min(fit, most));
  if (rows >= problem.rows) {
    return {0, std::min(problem.batch, rows / problem.rows), 0, problem.rows};
  }
  return {0, 1, 0, rows / TileRows(problem) * TileRows(problem)};
}

size_t LeastWorkspace(const Problem& problem) {
  const int64_t rows = std::min(problem.rows, TileRows(problem));
  return ScratchOf(problem).sums + static_cast<size_t>(4 * rows * PitchOf(problem));
}

Status WhyNotWorkspace(const Problem& problem, size_t workspace) {
  if (problem.batch * problem.rows * problem.columns == 0) return {};
  if (LargestPiece(problem, workspace).rows > 0) return {};
  return "`sm80_imma` needs a workspace of at least " + std::to_string(LeastWorkspace(problem)) +
         " bytes and got " + std::to_string(workspace);
}

Schedule MakeSchedule(const Problem& problem, const Piece& piece, int64_t multiprocessors) {
  Schedule s;
  s.row_tiles = static_cast<int32_t>(Ceil(piece.rows, TileRows(problem)));
  s.column_tiles = static_cast<int32_t>(Ceil(problem.columns, kTileColumns));
  s.depth_tiles = static_cast<int32_t>(Ceil(problem.depth, kTileDepth));
  const int64_t blocks = piece.batches * s.row_tiles * s.column_tiles;
  const int64_t wanted = Ceil(kBlocksPerMultiprocessor * multiprocessors, blocks);
  const int64_t most = std::max<int64_t>(1, s.depth_tiles / kMinTilesPerSplit);
  const int64_t splits = std::clamp<int64_t>(wanted, 1, most);
  s.depth_tiles_per_split = static_cast<int32_t>(std::max<int64_t>(1, Ceil(s.depth_tiles, splits)));
  s.splits =
      static_cast<int32_t>(std::max<int64_t>(1, Ceil(s.depth_tiles, s.depth_tiles_per_split)));
  return s;
}

}  // namespace jaxfp8::cuda::imma
