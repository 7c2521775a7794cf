#include "cuda/cublaslt/layout.h"

#include <algorithm>

namespace jaxfp8::cuda {
namespace {

constexpr int64_t kBytesAligned = 16;  // pointers and pitches of whatever the library reads
constexpr size_t kPlaceAligned = 256;
// What NVIDIA recommends for Hopper; more changes nothing, less takes split-K away.
constexpr size_t kLibraryBytes = size_t{32} << 20;
// Sums of a piece. On an H200, pieces of 32 MiB, which stay in its L2 until the epilogue, gained
// less than the tails of their products cost: 564 us against 551 (INT8, 4096 x 8192 x 8192), 994
// against 870 (W8A16, 4096 x 14336 x 4096), 284 against 266 (1024 rows).
constexpr int64_t kSumsBytes = int64_t{128} << 20;
// A piece smaller than this along an axis leaves a large GPU idle.
constexpr int64_t kGoodStep = 1024;
constexpr int64_t kLeastStep = 256;
// Pieces of the depth shorter than this spend their time on adding up: the general kernel wins.
constexpr int64_t kLeastDepth = 32;
// The library counts them in 32 bits.
constexpr int64_t kMostBatches = int64_t{1} << 30;
// An int32 sum of products of 8-bit integers is exact up to this depth.
constexpr int64_t kMostIntegerDepth = 131071;

int64_t Blocks(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
int64_t RoundUp(int64_t size, int64_t unit) { return Blocks(size, unit) * unit; }

bool VariesAlongDepth(const Side& side) {
  return (side.scale || side.zero_point) && !side.tiles.ConstantAlongDepth();
}

bool WholeTensor(const Side& side) {
  const Tiles& tiles = side.tiles;
  return !side.scale || (tiles.ConstantAlongDepth() && tiles.ConstantAlongFree());
}

// Whether the library can add the residual: one of the output's own type and shape.
bool AddsResidual(const Problem& problem) {
  const Plane &residual = problem.residual, &out = problem.out;
  return residual.dtype == out.dtype && residual.row == out.row && residual.column == out.column &&
         (problem.batch == 1 || residual.batch == out.batch);
}

// Whether nothing follows the scaled sum that the library cannot do as exactly. Its bias is of 16
// bits, its ReLU and GELU do not promise what becomes of NaN.
bool Plain(const Problem& problem) {
  const bool rest =
      problem.bias || problem.out_scale || problem.amax || problem.activation != Activation::kNone;
  return !rest && (!problem.residual || AddsResidual(problem)) && IsWideFloat(problem.out.dtype);
}

// Whether the library can round to FP8 itself: it multiplies by the reciprocal of one scale, which
// moves a value across the border of two codes at most. Its largest |y| is that before the scale,
// and NaN where there is one.
bool Encodes(const Problem& problem) {
  const auto single = [](const Plane& plane) {
    return !plane || (plane.batch == 0 && plane.row == 0 && plane.column == 0);
  };
  const bool rest = problem.bias || problem.residual || problem.activation != Activation::kNone;
  return IsFloat8(problem.out.dtype) && !rest && single(problem.out_scale) &&
         single(problem.amax) && (!problem.amax || problem.batch == 1);
}

// Whether the output is the bare sum of integers.
bool BareIntegers(const Problem& problem) {
  const bool plain = !problem.amax && !problem.lhs.zero_point && !problem.rhs.zero_point;
  return plain && problem.out.dtype == DType::kS32 && problem.lhs.dtype == DType::kS8 &&
         problem.rhs.dtype == DType::kS8;
}

// Whether the library's blocks can follow the tiles of the scale.
bool FitsBlocks(const Side& side) {
  return side.tiles.ConstantAlongDepth() || side.tiles.tile_depth % kScaleBlock == 0;
}

bool Aligned(int64_t elements, DType type) { return elements * SizeOf(type) % kBytesAligned == 0; }

SideLayout MakeSide(const Side& side, DType type, const Layout& layout) {
  SideLayout out;
  const int64_t pitch = side.IsMnMajor() ? side.depth : side.free;
  const bool turned = side.IsMnMajor() && SizeOf(type) == 1;
  out.packed = layout.attempt.padded || side.dtype != type || turned || !Aligned(pitch, type) ||
               !Aligned(side.batch, type);
  if (!out.packed) {
    out.depth_major = side.IsMnMajor();
    out.pitch = pitch;
    out.batch = side.batch;
  }
  return out;
}

// The depth of a piece, 0 where the tiles of both sides have no common one.
int64_t DepthStep(const Problem& problem, const Layout& layout) {
  int64_t step = problem.depth;
  const bool blocks = layout.attempt.scaling == Scaling::kBlocks;
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    if (blocks || !VariesAlongDepth(*side)) continue;
    const int64_t tile = side->tiles.tile_depth;
    if (step != problem.depth && step % tile != 0 && tile % step != 0) return 0;
    step = std::min(step, tile);
  }
  const bool inexact = layout.types.sums == DType::kS32 && problem.out.dtype != DType::kS32;
  if (!inexact || step <= kMostIntegerDepth) return step;
  return step == problem.depth ? (kMostIntegerDepth + 1) / 2 : 0;
}

// A stretch of the workspace, handed out piece by piece.
class Carver {
 public:
  size_t Take(int64_t bytes) {
    const size_t at = end_;
    end_ += RoundUp(bytes, kPlaceAligned);
    return at;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

int64_t ScaleBytes(const SideLayout& side, Scaling scaling, int64_t lines, int64_t depth) {
  if (!side.arranged_scale) return 0;
  if (scaling == Scaling::kOuterVectors) return 4 * ScalePitch(lines);
  if (side.square_blocks) return 4 * SquareScalePitch(depth) * Blocks(lines, kScaleBlock);
  return 4 * ScalePitch(lines) * Blocks(depth, kScaleBlock);
}

int64_t PackedBytes(const SideLayout& side, DType type, const Layout& layout, int64_t lines) {
  if (!side.packed) return 0;
  return layout.steps.batch * layout.Padded(lines) * side.pitch * SizeOf(type);
}

int64_t SumsBytes(const Layout& layout) {
  const Steps& s = layout.steps;
  return 4 * s.batch * layout.Padded(s.rows) * Layout::SumsPitch(layout.Padded(s.columns));
}

void Place(const Problem& problem, Layout& layout) {
  const Steps& s = layout.steps;
  const Scaling scaling = layout.attempt.scaling;
  Places& p = layout.places;
  Carver carver;
  p.lhs = carver.Take(PackedBytes(layout.lhs, layout.types.lhs, layout, s.rows));
  p.rhs = carver.Take(PackedBytes(layout.rhs, layout.types.rhs, layout, s.columns));
  p.lhs_sums = carver.Take(layout.lhs.sums ? 4 * s.batch * s.rows : 0);
  p.rhs_sums = carver.Take(layout.rhs.sums ? 4 * s.batch * s.columns : 0);
  p.lhs_scale = carver.Take(ScaleBytes(layout.lhs, scaling, layout.Padded(s.rows), problem.depth));
  p.rhs_scale =
      carver.Take(ScaleBytes(layout.rhs, scaling, layout.Padded(s.columns), problem.depth));
  p.sums = carver.Take(layout.direct ? 0 : SumsBytes(layout));
  p.totals = carver.Take(layout.cut ? SumsBytes(layout) : 0);
  p.constants = carver.Take(kPlaceAligned);
  p.library = carver.end();
}

bool TooLarge(const Layout& layout) { return !layout.direct && SumsBytes(layout) > kSumsBytes; }

bool Halve(int64_t& step, int64_t least) {
  if (step <= least) return false;
  step = std::max(RoundUp(Blocks(step, 2), least), least);
  return true;
}

bool Shrink(Steps& steps) {
  return Halve(steps.batch, 1) || Halve(steps.columns, kGoodStep) || Halve(steps.rows, kGoodStep) ||
         Halve(steps.columns, kLeastStep) || Halve(steps.rows, kLeastStep);
}

std::string Fit(const Problem& problem, size_t workspace, Layout& layout) {
  Places& p = layout.places;
  const size_t library = std::min(kLibraryBytes, workspace / 2 / kPlaceAligned * kPlaceAligned);
  while (true) {
    Place(problem, layout);
    const bool fits = p.library + library <= workspace;
    if (fits && !TooLarge(layout)) break;
    if (Shrink(layout.steps)) continue;
    if (fits) break;
    return "its workspace has " + std::to_string(workspace) + " bytes, but it needs " +
           std::to_string(p.library + library);
  }
  p.library_bytes = library;
  p.end = p.library + library;
  return "";
}

bool SquareTiles(const Side& side) {
  return side.scale && side.tiles.tile_free == kScaleBlock && side.tiles.tile_depth == kScaleBlock;
}

// Whether the library can take the scale of a side as it lies.
bool ScaleInPlace(const Side& side, const SideLayout& layout, Scaling scaling) {
  const Tiles& t = side.tiles;
  const bool aligned = t.batch_stride % 4 == 0;
  switch (scaling) {
    case Scaling::kOuterVectors:
      return side.scale && aligned && t.tile_free == 1 && t.free_stride == 1;
    case Scaling::kBlocks:
      return layout.square_blocks && aligned && t.depth_stride == 1 && t.free_stride > 0 &&
             t.free_stride % 4 == 0;
    default:
      return true;
  }
}

bool SumsNeeded(const Side& other, DType other_type) {
  return other.zero_point || (other.dtype == DType::kU8 && other_type == DType::kS8);
}

}  // namespace

int64_t ScalePitch(int64_t lines) { return RoundUp(lines, 4); }

int64_t SquareScalePitch(int64_t depth) { return RoundUp(Blocks(depth, kScaleBlock), 4); }

std::vector<Attempt> Attempts(const Problem& problem, const Device& device) {
  const bool hopper = device.compute_capability == 90;
  const bool floats = IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype);
  const bool varies = VariesAlongDepth(problem.lhs) || VariesAlongDepth(problem.rhs);
  const bool scaled = problem.lhs.scale || problem.rhs.scale;
  const bool both = problem.lhs.scale && problem.rhs.scale;
  const bool whole = WholeTensor(problem.lhs) && WholeTensor(problem.rhs);
  std::vector<Scaling> ways;
  if (varies) {
    if (hopper && floats && both && FitsBlocks(problem.lhs) && FitsBlocks(problem.rhs)) {
      ways.push_back(Scaling::kBlocks);
    }
  } else if (kLibraryEncodes && floats && whole && Encodes(problem)) {
    ways.push_back(Scaling::kScalar);
  } else if (BareIntegers(problem) || (Plain(problem) && (!scaled || (floats && whole)))) {
    ways.push_back(Scaling::kScalar);
  } else if (Plain(problem) && !problem.residual && floats && hopper && both) {
    ways.push_back(Scaling::kOuterVectors);
  }
  ways.push_back(Scaling::kEpilogue);
  std::vector<Attempt> attempts;
  for (Scaling way : ways) {
    for (bool padded : {false, true}) attempts.push_back({way, padded});
  }
  return attempts;
}

namespace {

// Why the attempt makes no sense for the problem; "" if it does.
std::string WhyNot(const Problem& problem, const Layout& layout) {
  const int64_t step = layout.steps.depth;
  if (layout.cut && (step < kLeastDepth || step % kBytesAligned != 0)) {
    return "its scales change every " + std::to_string(step) +
           " values of the depth (0: at no common distance), but it needs a multiple of 16, at "
           "least 32";
  }
  if (layout.cut && problem.out.dtype == DType::kS32) {
    return "zero points that change along the depth are summed in float32, and an int32 output "
           "needs exact sums";
  }
  const Scaling scaling = layout.attempt.scaling;
  const bool fours =
      layout.Padded(problem.rows) % 4 == 0 && layout.Padded(problem.columns) % 4 == 0;
  if (scaling == Scaling::kBlocks && !fours) return "block scales need rows and columns in fours";
  const bool scales = problem.lhs.scale || problem.rhs.scale;
  const bool by_mode = scaling != Scaling::kEpilogue && scales;
  if (by_mode && !IsFloat8(layout.types.lhs)) return "the library scales FP8 operands only";
  const bool needs_direct = scaling != Scaling::kBlocks && scaling != Scaling::kEpilogue;
  if (needs_direct && !layout.direct) return "the output's rows are not a multiple of 16 bytes";
  return "";
}

void ArrangeSides(const Problem& problem, Layout& layout) {
  const Scaling scaling = layout.attempt.scaling;
  const ProductTypes& types = layout.types;
  layout.lhs = MakeSide(problem.lhs, types.lhs, layout);
  layout.rhs = MakeSide(problem.rhs, types.rhs, layout);
  // Zeros after the last value of a line must meet zeros, not what follows on the other side.
  const bool ragged = !Aligned(problem.depth, types.lhs) || !Aligned(problem.depth, types.rhs);
  if (ragged) layout.lhs.packed = layout.rhs.packed = true;
  const int64_t padded = RoundUp(problem.depth, kBytesAligned);
  layout.depth = ragged || layout.attempt.padded ? padded : problem.depth;
  for (SideLayout* side : {&layout.lhs, &layout.rhs}) {
    if (!side->packed) continue;
    side->depth_major = false;
    side->pitch = padded;
  }
  // The library has no product of two sides in square blocks.
  layout.rhs.square_blocks = scaling == Scaling::kBlocks && SquareTiles(problem.rhs);
  layout.lhs.square_blocks =
      scaling == Scaling::kBlocks && SquareTiles(problem.lhs) && !layout.rhs.square_blocks;
  layout.lhs.arranged_scale = !ScaleInPlace(problem.lhs, layout.lhs, scaling);
  layout.rhs.arranged_scale = !ScaleInPlace(problem.rhs, layout.rhs, scaling);
  if (types.sums != DType::kS32) return;
  layout.lhs.sums = SumsNeeded(problem.rhs, types.rhs);
  layout.rhs.sums = SumsNeeded(problem.lhs, types.lhs);
}

}  // namespace

std::string MakeLayout(const Problem& problem, const ProductTypes& types, const Attempt& attempt,
                       size_t workspace, Layout& layout) {
  layout = Layout{};
  layout.attempt = attempt;
  layout.types = types;
  ArrangeSides(problem, layout);
  layout.encodes = attempt.scaling == Scaling::kScalar && Encodes(problem);
  const bool finished =
      types.sums == DType::kS32 ? BareIntegers(problem) : layout.encodes || Plain(problem);
  const bool adds = attempt.scaling == Scaling::kScalar;
  layout.direct = finished && attempt.scaling != Scaling::kEpilogue &&
                  (!problem.residual || adds) && Aligned(problem.columns, problem.out.dtype) &&
                  layout.Padded(problem.rows) == problem.rows &&
                  layout.Padded(problem.columns) == problem.columns;
  // A scale in the library's hands is that of one batch index.
  const bool by_batch = problem.lhs.tiles.batch_stride || problem.rhs.tiles.batch_stride;
  const bool single =
      attempt.scaling == Scaling::kScalar ? by_batch : attempt.scaling != Scaling::kEpilogue;
  const int64_t depth_step = DepthStep(problem, layout);
  layout.cut = depth_step != problem.depth;
  layout.steps = {single ? 1 : std::min(problem.batch, kMostBatches), problem.rows, problem.columns,
                  depth_step};
  std::string wrong = WhyNot(problem, layout);
  if (wrong.empty()) wrong = Fit(problem, workspace, layout);
  if (!wrong.empty() || !layout.encodes || !problem.amax) return wrong;
  const Steps& s = layout.steps;
  const bool whole = s.rows >= problem.rows && s.columns >= problem.columns;
  return whole ? "" : "the library finds the largest output of one product, not of several";
}

}  // namespace jaxfp8::cuda
