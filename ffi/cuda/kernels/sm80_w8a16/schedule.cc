#include "cuda/kernels/sm80_w8a16/schedule.h"

#include <algorithm>
#include <limits>

#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

// A block with fewer iterations spends its time on filling the pipeline; with more, multiprocessors
// stay idle. On an H200, 4 is 1.03x to 1.07x slower for 1 to 16 rows of 1024 x 8192 weights.
constexpr int64_t kMinIterationsPerBlock = 2;

// Blocks that run at a time on the largest device the kernel is compiled for: 3 on each of the 148
// multiprocessors of a B200, limited by shared memory.
constexpr int64_t kMaxBlocksAtOnce = 3 * 148;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t DepthTiles(const Problem& problem) { return Ceil(problem.depth, kTileDepth); }

// How many of `blocks_at_once` blocks have work in so many output tiles.
int64_t UsefulBlocks(const Problem& problem, int64_t output_tiles, int64_t blocks_at_once) {
  const int64_t useful =
      std::max(output_tiles, output_tiles * DepthTiles(problem) / kMinIterationsPerBlock);
  return std::min(blocks_at_once, useful);
}

// How many of the `left` output tiles one launch computes, with room for `partials` partial tiles.
// All of them, if three quarters of the useful blocks still get a partial tile, because a further
// launch costs more than idle blocks. Otherwise as many as leave a partial tile for every block,
// or, with too little room for that, as many as keep the blocks that have one busy.
int64_t TilesPerLaunch(const Problem& problem, int64_t blocks_at_once, int64_t partials,
                       int64_t left) {
  const int64_t busy = UsefulBlocks(problem, left, blocks_at_once);
  if (partials - left + 1 >= busy - busy / 4) return left;
  const int64_t few = partials / (1 + DepthTiles(problem) / kMinIterationsPerBlock);
  return std::clamp<int64_t>(std::max(partials - blocks_at_once, few), 1, left);
}

bool ScalesVaryAlongDepth(const Problem& problem) {
  return (problem.rhs.scale || problem.rhs.zero_point) && !problem.rhs.tiles.ConstantAlongDepth();
}

// Whether something that the kernel counts in 32 bits does not fit.
bool TooLarge(const Problem& problem) {
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max() / 2;
  for (int64_t size : {problem.rows, problem.columns, problem.batch, problem.depth}) {
    if (size > kMaxCount) return true;
  }
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t output_tiles =  // below 2^60 by the limits above
      Ceil(problem.rows, 8 * row_fragments) * Ceil(problem.columns, kTileColumns);
  return output_tiles > kMaxCount || output_tiles * problem.batch > kMaxCount ||
         DepthTiles(problem) > kMaxCount / std::max<int64_t>(1, output_tiles * problem.batch);
}

std::string WhyNotTypes(const Problem& problem) {
  const std::string got =
      std::string(NameOf(problem.lhs.dtype)) + " and " + std::string(NameOf(problem.rhs.dtype));
  const bool wide = problem.lhs.dtype == DType::kBF16 || problem.lhs.dtype == DType::kF16;
  if (!wide || !IsEightBit(problem.rhs.dtype)) {
    return "it multiplies bfloat16 or float16 by an 8-bit type, and the operands are " + got;
  }
  if (problem.out.dtype == DType::kS32) {
    return "its sums are rounded, and an int32 output needs exact ones";
  }
  return "";
}

std::string WhyNotTiles(const Problem& problem) {
  if (problem.lhs.zero_point) return "its 16-bit side cannot have zero points";
  if (problem.lhs.scale && !problem.lhs.tiles.ConstantAlongDepth()) {
    return "its 16-bit side needs scales constant along the contracted axis";
  }
  const Tiles& tiles = problem.rhs.tiles;
  const bool tiled = problem.rhs.scale || problem.rhs.zero_point;
  if (tiled && !tiles.ConstantAlongDepth() && tiles.tile_depth % kTileDepth != 0) {
    return "scales and zero points of its 8-bit side may change every multiple of 128 along the "
           "contracted axis, and these change every " +
           std::to_string(tiles.tile_depth);
  }
  return "";
}

}  // namespace

int RowFragmentsFor(const Problem& problem) {
  const int most = ScalesVaryAlongDepth(problem) ? 4 : 8;
  int row_fragments = 1;
  while (row_fragments < most && problem.rows > 8 * row_fragments) row_fragments *= 2;
  return row_fragments;
}

int64_t OutputTiles(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  return problem.batch * Ceil(problem.rows, 8 * row_fragments) *
         Ceil(problem.columns, kTileColumns);
}

size_t PartialTileBytes(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t rows = std::min<int64_t>(problem.rows, 8 * row_fragments);
  return sizeof(float) * static_cast<size_t>(rows * kTileColumns);
}

size_t PackedBytesOf(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t batches = problem.lhs.batch == 0 ? 1 : problem.batch;
  return static_cast<size_t>(batches * Ceil(problem.rows, 8 * row_fragments) *
                             DepthTiles(problem)) *
         PackedBytes(row_fragments);
}

Schedule MakeSchedule(const Problem& problem, int64_t blocks_at_once, size_t workspace,
                      int64_t first) {
  const int row_fragments = RowFragmentsFor(problem);
  Schedule s;
  s.column_tiles = static_cast<int32_t>(Ceil(problem.columns, kTileColumns));
  s.row_tiles = static_cast<int32_t>(Ceil(problem.rows, 8 * row_fragments));
  s.depth_tiles = static_cast<int32_t>(DepthTiles(problem));
  s.first = static_cast<int32_t>(first);
  const auto partials = static_cast<int64_t>(workspace / PartialTileBytes(problem));
  s.output_tiles = static_cast<int32_t>(
      TilesPerLaunch(problem, blocks_at_once, partials, OutputTiles(problem) - first));
  if (problem.depth == 0) return s;
  s.SplitAmong(std::min(partials - s.output_tiles + 1,
                        UsefulBlocks(problem, s.output_tiles, blocks_at_once)));
  return s;
}

std::string WhyNotWorkspace(const Problem& problem, size_t packed, size_t workspace) {
  const size_t least = packed + PartialTileBytes(problem);
  if (workspace >= least) return "";
  return "`sm80_w8a16` needs a workspace of at least " + std::to_string(least) + " bytes and got " +
         std::to_string(workspace);
}

std::string WhyNotForm(const Problem& problem) {
  if (TooLarge(problem)) return "it counts its tiles in 32 bits, and this product has more";
  const std::string types = WhyNotTypes(problem);
  return types.empty() ? WhyNotTiles(problem) : types;
}

std::string WhyNotProblem(const Problem& problem, const Device& device) {
  if (device.compute_capability < 80) {
    return "it needs compute capability 8.0, and the device has " +
           std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10);
  }
  if (static_cast<int>(device.shared_bytes) < SharedBytes(RowFragmentsFor(problem))) {
    return "it needs " + std::to_string(SharedBytes(RowFragmentsFor(problem))) +
           " bytes of shared memory per block, and the device has " +
           std::to_string(device.shared_bytes);
  }
  return WhyNotForm(problem);
}

size_t BestWorkspace(const Problem& problem) {
  const size_t packed = PacksActivations(RowFragmentsFor(problem)) ? PackedBytesOf(problem) : 0;
  const int64_t output_tiles = OutputTiles(problem);
  const int64_t partials = output_tiles + UsefulBlocks(problem, output_tiles, kMaxBlocksAtOnce) - 1;
  return packed + static_cast<size_t>(std::max<int64_t>(partials, 1)) * PartialTileBytes(problem);
}

bool HasWeightsOnLeft(const Problem& problem) {
  return IsEightBit(problem.lhs.dtype) && !IsEightBit(problem.rhs.dtype);
}

Problem WithWeightsOnRight(const Problem& problem) {
  return HasWeightsOnLeft(problem) ? Swapped(problem) : problem;
}

std::string WhyNotEither(const Problem& problem, const Device& device) {
  return WhyNotProblem(WithWeightsOnRight(problem), device);
}

}  // namespace jaxfp8::cuda::w8a16
