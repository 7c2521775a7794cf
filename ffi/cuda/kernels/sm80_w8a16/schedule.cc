#include "cuda/kernels/sm80_w8a16/schedule.h"

#include <algorithm>
#include <limits>

#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

// A block with fewer steps spends its time on filling the pipeline, more leave multiprocessors
// idle: with 4, an H200 takes 3 to 7 % longer for 1 to 16 rows of 1024 x 8192 weights.
constexpr int64_t kFewestSteps = 2;

// Blocks at a time of the largest device that the kernel is compiled for: 3 on each of the 148
// multiprocessors of a B200, all that shared memory has room for. (An H200 has 396.)
constexpr int64_t kMostResident = 3 * 148;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t DepthTiles(const Problem& problem) { return Ceil(problem.depth, kTileDepth); }

// Blocks that share so many outputs, where `resident` are there at a time.
int64_t UsefulBlocks(const Problem& problem, int64_t outputs, int64_t resident) {
  const int64_t useful = std::max(outputs, outputs * DepthTiles(problem) / kFewestSteps);
  return std::min(resident, useful);
}

// Of the outputs that are left. All of them, if that leaves slots for most of the blocks that they
// keep busy: a further launch costs more. Else as many as leave slots for all blocks; where there
// are too few slots for these, as many as keep busy what blocks there are slots for.
int64_t OutputsAtOnce(const Problem& problem, int64_t resident, int64_t slots, int64_t left) {
  const int64_t busy = UsefulBlocks(problem, left, resident);
  if (slots - left + 1 >= busy - busy / 4) return left;
  const int64_t few = slots / (1 + DepthTiles(problem) / kFewestSteps);
  return std::clamp<int64_t>(std::max(slots - resident, few), 1, left);
}

bool FoldsSums(const Problem& problem) {
  return (problem.rhs.scale || problem.rhs.zero_point) && !problem.rhs.tiles.ConstantAlongDepth();
}

// Whether everything that is counted in 32 bits fits.
bool TooLarge(const Problem& problem) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  for (int64_t size : {problem.rows, problem.columns, problem.batch, problem.depth}) {
    if (size > kMost) return true;
  }
  const int eights = EightsFor(problem);
  const int64_t outputs =  // below 2^60 by the limits above
      Ceil(problem.rows, 8 * eights) * Ceil(problem.columns, kTileColumns);
  return outputs > kMost || outputs * problem.batch > kMost ||
         DepthTiles(problem) > kMost / std::max<int64_t>(1, outputs * problem.batch);
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

int EightsFor(const Problem& problem) {
  const int most = FoldsSums(problem) ? 4 : 8;
  int eights = 1;
  while (eights < most && problem.rows > 8 * eights) eights *= 2;
  return eights;
}

int64_t OutputsOf(const Problem& problem) {
  const int eights = EightsFor(problem);
  return problem.batch * Ceil(problem.rows, 8 * eights) * Ceil(problem.columns, kTileColumns);
}

size_t SlotBytes(const Problem& problem) {
  const int eights = EightsFor(problem);
  const int64_t rows = std::min<int64_t>(problem.rows, 8 * eights);
  return sizeof(float) * static_cast<size_t>(rows * kTileColumns);
}

size_t PackedBytesOf(const Problem& problem) {
  const int eights = EightsFor(problem);
  const int64_t batches = problem.lhs.batch == 0 ? 1 : problem.batch;
  return static_cast<size_t>(batches * Ceil(problem.rows, 8 * eights) * DepthTiles(problem)) *
         PackedBytes(eights);
}

Schedule MakeSchedule(const Problem& problem, int64_t resident, size_t workspace, int64_t first) {
  const int eights = EightsFor(problem);
  Schedule s;
  s.column_tiles = static_cast<int32_t>(Ceil(problem.columns, kTileColumns));
  s.row_tiles = static_cast<int32_t>(Ceil(problem.rows, 8 * eights));
  s.depth_tiles = static_cast<int32_t>(DepthTiles(problem));
  s.first = static_cast<int32_t>(first);
  const auto slots = static_cast<int64_t>(workspace / SlotBytes(problem));
  s.outputs =
      static_cast<int32_t>(OutputsAtOnce(problem, resident, slots, OutputsOf(problem) - first));
  if (problem.depth == 0) return s;
  s.Share(std::min(slots - s.outputs + 1, UsefulBlocks(problem, s.outputs, resident)));
  return s;
}

std::string WhyNotWorkspace(const Problem& problem, size_t packed, size_t workspace) {
  const size_t least = packed + SlotBytes(problem);
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
  if (static_cast<int>(device.shared_bytes) < SharedBytes(EightsFor(problem))) {
    return "it needs " + std::to_string(SharedBytes(EightsFor(problem))) +
           " bytes of shared memory per block, and the device has " +
           std::to_string(device.shared_bytes);
  }
  return WhyNotForm(problem);
}

size_t BestWorkspace(const Problem& problem) {
  const size_t packed = PacksFor(EightsFor(problem)) ? PackedBytesOf(problem) : 0;
  const int64_t outputs = OutputsOf(problem);
  const int64_t slots = outputs + UsefulBlocks(problem, outputs, kMostResident) - 1;
  return packed + static_cast<size_t>(std::max<int64_t>(slots, 1)) * SlotBytes(problem);
}

bool WeightsOnTheLeft(const Problem& problem) {
  return IsEightBit(problem.lhs.dtype) && !IsEightBit(problem.rhs.dtype);
}

Problem WeightsRight(const Problem& problem) {
  return WeightsOnTheLeft(problem) ? Swapped(problem) : problem;
}

std::string WhyNotEither(const Problem& problem, const Device& device) {
  return WhyNotProblem(WeightsRight(problem), device);
}

}  // namespace jaxfp8::cuda::w8a16
