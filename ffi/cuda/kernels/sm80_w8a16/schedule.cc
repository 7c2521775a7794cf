#include "cuda/kernels/sm80_w8a16/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/sizes.h"
#include "cuda/kernels/common/groups.h"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

// CTAs that run at a time on the largest device without clusters: three on each of the 128
// multiprocessors of a full A100, limited by shared memory.
constexpr int64_t kMaxBlocksAtOnce = 3 * 128;

// CTAs along the third axis of a grid.
constexpr int64_t kMaxOuterBatch = 65535;

int64_t DepthTiles(const Problem& problem) { return DivideUp(problem.depth, kTileDepth); }

// The most CTAs for one tile if the tiles do not all run at a time. On an H100 two are 1.09x
// faster than three (1344 CTAs).
constexpr int kMaxSplitInWaves = 2;

// Tiles have room for groups of so many times the mean of their rows: a second tile reads the
// weights again.
constexpr double kRowsOverMean = 1.5;

// The factor of a third CTA on a multiprocessor's time. One row waits longer for memory; with 64
// rows more of the arithmetic overlaps.
double ThirdBlock(int row_fragments) {
  return row_fragments == 1 ? 1.1 : row_fragments == 8 ? 0.93 : 1.0;
}

// The time of `ctas` CTAs on a multiprocessor, in units of one CTA's. Three run together. Two
// take as long as one, because one alone waits for memory half of its time.
double LoadOf(int64_t ctas, double third) {
  const int64_t rest = ctas % kCtasPerSm, whole = ctas - rest;
  return static_cast<double>(whole) * third +
         static_cast<double>(rest > 0 ? std::max<int64_t>(rest, 2) : 0);
}

// The same if the CTAs of all tiles run at once. Larger clusters are spread unevenly: above 0.85
// CTAs per multiprocessor, some get one more. Pairs are spread evenly.
double LoadAtOnce(int64_t ctas, int64_t multiprocessors, int split, double third) {
  const auto spread = static_cast<int64_t>(
      std::ceil(static_cast<double>(ctas) / (0.85 * static_cast<double>(multiprocessors))));
  if (split <= 2) return LoadOf(std::min<int64_t>(spread, kCtasPerSm), third);
  return spread == kCtasPerSm ? kCtasPerSm * third
                              : static_cast<double>(std::max<int64_t>(spread, 2));
}

// The output tiles that have rows, where groups are of one size.
int64_t LikelyTiles(const Problem& problem) {
  if (!GroupsRows(problem)) return OutputTiles(problem);
  const int64_t groups = std::min(problem.batch, problem.rows);
  const int64_t rows = DivideUp(problem.rows, std::max<int64_t>(1, groups));
  return groups * DivideUp(rows, 8 * RowFragmentsFor(problem)) *
         DivideUp(problem.columns, kTileColumns);
}

// What a CTA of groups takes beside its tiles of K, in these: it finds its rows before it loads.
// On an H200 640 rows in 512 groups took 1460 us with 4096 x 1024 weights, by two CTAs for each
// output, and 1192 us with 2048 x 4096, which are twice the bytes.
constexpr double kFindsGroup = 3;

// The time of an output tile split this way, in tiles of K. Fitted to measurements on an H100.
// Adding a rank's sums takes 0.7 of a tile.
double CostOf(const Problem& problem, const Capacity& capacity, int split) {
  const int64_t tiles = LikelyTiles(problem), sms = capacity.multiprocessors;
  const double third = ThirdBlock(RowFragmentsFor(problem));
  const double load = tiles <= capacity.tiles[split] ? LoadAtOnce(tiles * split, sms, split, third)
                                                     : LoadOf(DivideUp(tiles * split, sms), third);
  const double beside = GroupsRows(problem) ? kFindsGroup : 0;
  return load * (static_cast<double>(DivideUp(DepthTiles(problem), split)) + beside) + 0.7 * split;
}

int BestSplit(const Problem& problem, const Capacity& capacity) {
  int best = 1;
  for (int split = 2; split <= kMaxSplit && split <= DepthTiles(problem); ++split) {
    const bool at_once = LikelyTiles(problem) <= capacity.tiles[split];
    const bool in_waves = capacity.in_waves && capacity.tiles[split] > 0;
    if (!at_once && !(in_waves && split <= kMaxSplitInWaves)) continue;
    if (CostOf(problem, capacity, split) < CostOf(problem, capacity, best)) best = split;
  }
  return best;
}

bool ScalesVaryAlongDepth(const Problem& problem) {
  return (problem.rhs.scale || problem.rhs.zero_point) && !problem.rhs.tiles.ConstantAlongDepth();
}

// Whether one of the kernel's 32-bit counts would overflow.
bool TooLarge(const Problem& problem) {
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max() / 2;
  for (int64_t size : {problem.rows, problem.columns, problem.batch, problem.depth}) {
    if (size > kMaxCount) return true;
  }
  // The distance of a column's scale from the first column's.
  constexpr int64_t kMaxScales = std::numeric_limits<int32_t>::max();
  if (problem.rhs.tiles.free_stride > kMaxScales / std::max<int64_t>(1, problem.columns)) {
    return true;
  }
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t of_matrix =  // below 2^60 by the limits above
      DivideUp(problem.rows, 8 * row_fragments) * DivideUp(problem.columns, kTileColumns);
  if (of_matrix > kMaxCount) return true;
  const int64_t output_tiles = OutputTiles(problem);
  return output_tiles > kMaxCount ||
         DepthTiles(problem) > kMaxCount / std::max<int64_t>(1, output_tiles);
}

// Whether one kernel, with one split of K, can compute both problems.
bool RunsAlike(const Problem& a, const Problem& b) {
  return a.batch == b.batch && a.rows == b.rows && a.depth == b.depth &&
         a.lhs.dtype == b.lhs.dtype && a.rhs.dtype == b.rhs.dtype &&
         a.rhs.IsMnMajor() == b.rhs.IsMnMajor() && RowFragmentsFor(a) == RowFragmentsFor(b) &&
         HasFineScales(a) == HasFineScales(b);
}

// Whether the scales of both weights change at the same places along K.
bool SharesBlocks(const Problem& a, const Problem& b) {
  const bool varies = ScalesVaryAlongDepth(a);
  return varies == ScalesVaryAlongDepth(b) &&
         (!varies || a.rhs.tiles.tile_depth == b.rhs.tiles.tile_depth);
}

Status WhyNotPair(std::span<const Problem> problems) {
  if (problems.size() != 2) return "a gated launch multiplies the outputs of two products";
  const Problem &gate = problems[0], &up = problems[1];
  if (gate.columns != up.columns || !SharesBlocks(gate, up)) {
    return "products of a gated launch need one number of columns, and one of scales along the "
           "contracted axis";
  }
  return {};
}

Status WhyNotTypes(const Problem& problem) {
  const bool wide = problem.lhs.dtype == DType::kBF16 || problem.lhs.dtype == DType::kF16;
  const bool floats = problem.lhs.dtype == DType::kE4M3 && IsFloat8(problem.rhs.dtype);
  if (floats && problem.rows > kMaxFloat8Rows) {
    return "it multiplies at most " + std::to_string(kMaxFloat8Rows) +
           " rows of float8_e4m3fn by FP8, and these are " + std::to_string(problem.rows);
  }
  if (!floats && (!wide || !IsEightBit(problem.rhs.dtype))) {
    return "it multiplies bfloat16 or float16 by an 8-bit type, or float8_e4m3fn by FP8, and the "
           "operands are " +
           TypesOf(problem);
  }
  if (problem.out.dtype == DType::kS32) {
    return "its sums are rounded, and an int32 output needs exact ones";
  }
  return {};
}

// Why fine scales do not fit the kernel.
Status WhyNotFine(const Problem& problem) {
  if (problem.rhs.zero_point) {
    return "zero points of its 8-bit side may change every multiple of 128 along the contracted "
           "axis, and these change every " +
           std::to_string(problem.rhs.tiles.tile_depth);
  }
  if (problem.grouping != Grouping::kNone) return "its groups have no scales of 32 or 64";
  if (IsFloat8(problem.lhs.dtype)) return "beside scales of 32 or 64 its activations have 16 bits";
  return {};
}

Status WhyNotTiles(const Problem& problem) {
  if (problem.lhs.zero_point) return "its activations cannot have zero points";
  if (problem.lhs.scale && !problem.lhs.tiles.ConstantAlongDepth()) {
    return "scales of its activations have to be constant along the contracted axis";
  }
  if (!problem.lhs.HasPlainScales()) {
    return "scales of its activations have to be float32, and are not rounded";
  }
  const Tiles& tiles = problem.rhs.tiles;
  const bool tiled = problem.rhs.scale || problem.rhs.zero_point;
  if (HasFineScales(problem)) return WhyNotFine(problem);
  if (tiled && !tiles.ConstantAlongDepth() && tiles.tile_depth % kTileDepth != 0) {
    return "scales and zero points of its 8-bit side may change every multiple of 128 along the "
           "contracted axis, scales every 32 or 64, and these change every " +
           std::to_string(tiles.tile_depth);
  }
  return {};
}

}  // namespace

bool HasFineScales(const Problem& problem) {
  const int64_t depth = problem.rhs.tiles.tile_depth;
  return ScalesVaryAlongDepth(problem) && (depth == kFineDepth || depth == 2 * kFineDepth);
}

int RowFragmentsFor(const Problem& problem) {
  const int most = ScalesVaryAlongDepth(problem) && !HasFineScales(problem) ? 4 : 8;
  auto rows = static_cast<double>(problem.rows);
  if (GroupsRows(problem) && problem.batch > 0) {
    rows = std::min(rows, kRowsOverMean * rows / static_cast<double>(problem.batch));
  }
  int row_fragments = 1;
  while (row_fragments < most && rows > 8 * row_fragments) row_fragments *= 2;
  return row_fragments;
}

int64_t OutputTiles(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t across = DivideUp(problem.columns, kTileColumns);
  if (GroupsRows(problem)) return MostUnits(GroupsOf(problem, 8 * row_fragments)) * across;
  return problem.batch * DivideUp(problem.rows, 8 * row_fragments) * across;
}

int64_t OuterBatch(const Problem& problem) {
  return problem.inner_batch > 1 ? problem.batch / problem.inner_batch : 1;
}

size_t PartialTileBytes(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  const int64_t rows = std::min<int64_t>(problem.rows, 8 * row_fragments);
  return sizeof(float) * static_cast<size_t>(rows * kTileColumns);
}

SplitKSchedule MakeSchedule(const Problem& problem, const Capacity& capacity) {
  SplitKSchedule s;
  s.column_tiles = static_cast<int32_t>(DivideUp(problem.columns, kTileColumns));
  const int64_t rows = WithEvenGroups(problem).rows;
  s.row_tiles = static_cast<int32_t>(DivideUp(rows, 8 * RowFragmentsFor(problem)));
  s.depth_tiles = static_cast<int32_t>(DepthTiles(problem));
  s.output_tiles = static_cast<int32_t>(OutputTiles(problem));
  s.split = BestSplit(problem, capacity);
  return s;
}

Problem JointProblem(std::span<const Problem> problems) {
  Problem joint = problems.front();
  int64_t tiles = 0;
  for (const Problem& problem : problems) tiles += DivideUp(problem.columns, kTileColumns);
  joint.columns = tiles * kTileColumns;
  return joint;
}

PartTiles PartTilesOf(std::span<const Problem> problems) {
  PartTiles tiles;
  std::ranges::fill(tiles.first, std::numeric_limits<int32_t>::max());
  int64_t first = 0;
  for (size_t i = 0; i < problems.size(); ++i) {
    tiles.first[i] = static_cast<int32_t>(first);
    first += OutputTiles(problems[i]);
  }
  return tiles;
}

SplitKSchedule PartSchedule(const Problem& problem, const SplitKSchedule& joint) {
  SplitKSchedule s = joint;
  s.column_tiles = static_cast<int32_t>(DivideUp(problem.columns, kTileColumns));
  s.output_tiles = static_cast<int32_t>(OutputTiles(problem));
  return s;
}

Capacity CapacityOf(const Problem& problem, int64_t multiprocessors, int64_t ctas_per_sm,
                    size_t workspace) {
  Capacity capacity;
  capacity.multiprocessors = multiprocessors;
  const size_t tile_bytes = std::max<size_t>(1, PartialTileBytes(problem));
  for (int split = 1; split <= kMaxSplit; ++split) {
    const auto fits = static_cast<int64_t>(workspace / tile_bytes / static_cast<size_t>(split));
    capacity.tiles[split] = std::min(multiprocessors * ctas_per_sm / split, fits);
  }
  return capacity;
}

Status WhyNotForm(const Problem& problem) {
  if (TooLarge(problem)) return "it counts tiles and scales in 32 bits, and there are more";
  if (!problem.lhs.HasOneBatchStride()) {
    return "its activations and their scales need one stride along the batch";
  }
  if (OuterBatch(problem) > kMaxOuterBatch) {
    return "a launch has at most " + std::to_string(kMaxOuterBatch) +
           " indices of the outer batch axis, and these are " + std::to_string(OuterBatch(problem));
  }
  JAXFP8_RETURN_IF_ERROR(WhyNotTypes(problem));
  if (problem.grouping != Grouping::kNone) {
    if (!GroupsRows(problem) || IsEightBit(problem.lhs.dtype)) {
      return "its groups are rows of 16 bits";
    }
    JAXFP8_RETURN_IF_ERROR(WhyNotGroups(problem));
  }
  return WhyNotTiles(problem);
}

Status WhyNotProblem(const Problem& problem, const Device& device) {
  if (device.compute_capability < 80) return NeedsCapability(80, device);
  const int shared = SharedBytes(RowFragmentsFor(problem), HasFineScales(problem));
  if (static_cast<int>(device.shared_bytes) < shared) {
    return "it needs " + std::to_string(shared) +
           " bytes of shared memory per block, and the device has " +
           std::to_string(device.shared_bytes);
  }
  return WhyNotForm(problem);
}

Status WhyNotJoint(std::span<const Problem> problems, const Device& device) {
  if (problems.empty() || problems.size() > static_cast<size_t>(kMaxParts)) {
    return "a launch computes 1 to " + std::to_string(kMaxParts) + " products, and these are " +
           std::to_string(problems.size());
  }
  if (device.compute_capability < 90) {
    return "products share a launch from compute capability 9.0 on, and the device has " +
           CapabilityText(device.compute_capability);
  }
  const Problem& first = problems.front();
  for (const Problem& problem : problems) {
    JAXFP8_RETURN_IF_ERROR(WhyNotProblem(problem, device));
    if (problem.batch * problem.rows * problem.columns == 0) return "one of its products is empty";
    if (problem.inner_batch > 1) return "products of one launch need one stride along the batch";
    if (!RunsAlike(first, problem)) {
      return "products of one launch need one batch, rows, depth, type of each side, layout of the "
             "weights and row tile";
    }
  }
  return TooLarge(JointProblem(problems)) ? "it counts its tiles in 32 bits" : "";
}

Status WhyNotGated(std::span<const Problem> problems, const Gate& gate, const Device& device) {
  JAXFP8_RETURN_IF_ERROR(WhyNotJoint(problems, device));
  if (!gate) return {};
  for (const Problem& problem : problems) {
    if (!HasPlainEpilogue(problem)) {
      return "products of a gated launch have no zero points, amax or 8-bit outputs";
    }
    if (HasFineScales(problem)) {
      return "scales of products of a gated launch change every multiple of 128 along K";
    }
  }
  return WhyNotPair(problems);
}

bool HasPlainEpilogue(const Problem& problem) {
  return !problem.amax && !problem.out_scale && !problem.rhs.zero_point &&
         !IsEightBit(problem.out.dtype);
}

size_t BestWorkspace(const Problem& problem) {
  const int64_t weights =
      (problem.rhs.batch_stride == 0 ? 1 : problem.batch) * problem.columns * problem.depth;
  const int64_t tiles = std::max<int64_t>(1, OutputTiles(problem));
  const auto tile_bytes = static_cast<int64_t>(PartialTileBytes(problem));
  const int64_t room = weights / 10 / tiles / std::max<int64_t>(1, tile_bytes);
  const int64_t split =
      std::min({int64_t{kMaxSplit}, kMaxBlocksAtOnce / tiles, DepthTiles(problem), room});
  return split > 1 ? static_cast<size_t>(split * tiles * tile_bytes) : 0;
}

bool HasWeightsOnLeft(const Problem& problem) {
  if (!IsEightBit(problem.lhs.dtype)) return false;
  return !IsEightBit(problem.rhs.dtype) || problem.rows > problem.columns;
}

Problem WithWeightsOnRight(const Problem& problem) {
  return HasWeightsOnLeft(problem) ? Swapped(problem) : problem;
}

Status WhyNotEither(const Problem& problem, const Device& device) {
  return WhyNotProblem(WithWeightsOnRight(problem), device);
}

}  // namespace jaxfp8::cuda::w8a16
