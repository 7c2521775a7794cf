#include "cuda/cublaslt/layout.h"

#include <algorithm>
#include <tuple>

#include "common/sizes.h"

namespace jaxfp8::cuda {
namespace {

constexpr int64_t kBytesAligned = 16;  // the library's requirement for pointers and pitches
constexpr size_t kOffsetAlignment = 256;
// NVIDIA's recommendation for Hopper. More changes nothing; with less the library cannot split K.
constexpr size_t kLibraryWorkspaceBytes = size_t{32} << 20;
// The accumulators of a piece. Pieces of 32 MiB would stay in L2 until the epilogue, but are 1.02x
// to 1.14x slower on an H200.
constexpr int64_t kMaxAccumulatorBytes = int64_t{128} << 20;
// Smaller pieces leave a large GPU idle, so they are the last resort.
constexpr int64_t kEfficientPiece = 1024;
constexpr int64_t kMinPiece = 256;
// With shorter pieces of K the general kernel is faster, because adding the pieces takes too long.
constexpr int64_t kMinPieceDepth = 32;
// The library counts them in 32 bits.
constexpr int64_t kMaxBatches = int64_t{1} << 30;
// An int32 sum of products of 8-bit integers is exact up to this depth.
constexpr int64_t kMaxExactDepth = 131071;

bool Aligned(int64_t elements, DType type) { return elements * SizeOf(type) % kBytesAligned == 0; }

SideLayout MakeSide(const Side& side, DType type, const Layout& layout) {
  SideLayout out;
  const int64_t pitch = side.IsMnMajor() ? side.depth_stride : side.free_stride;
  const bool transposed = side.IsMnMajor() && SizeOf(type) == 1;
  out.packed = layout.attempt.padded || side.dtype != type || transposed || !Aligned(pitch, type) ||
               !Aligned(side.batch_stride, type);
  if (!out.packed) {
    out.mn_major = side.IsMnMajor();
    out.pitch = pitch;
    out.batch_stride = side.batch_stride;
  }
  return out;
}

// The K of a piece: the scale tile's K if scales vary along K. 0 if neither side's tile is a
// multiple of the other's, or if a scale tile is too deep for an exact sum.
int64_t PieceDepth(const Problem& problem, const Layout& layout) {
  int64_t step = problem.depth;
  const bool blocks = layout.attempt.scaling == Scaling::kBlocks;
  for (const Side* side : {&problem.lhs, &problem.rhs}) {
    if (blocks || !VariesAlongDepth(*side)) continue;
    const int64_t tile = side->tiles.tile_depth;
    if (step != problem.depth && step % tile != 0 && tile % step != 0) return 0;
    step = std::min(step, tile);
  }
  const bool inexact = layout.types.accumulator == DType::kS32 && problem.out.dtype != DType::kS32;
  if (!inexact || step <= kMaxExactDepth) return step;
  return step == problem.depth ? (kMaxExactDepth + 1) / 2 : 0;
}

// Hands out aligned ranges of the workspace.
class OffsetAllocator {
 public:
  size_t Take(int64_t bytes) {
    const size_t at = end_;
    end_ += RoundUp(bytes, kOffsetAlignment);
    return at;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

int64_t ScaleBytes(const SideLayout& side, Scaling scaling, int64_t lines, int64_t depth) {
  if (!side.copies_scale) return 0;
  if (scaling == Scaling::kOuterVectors) return 4 * ScalePitch(lines);
  if (side.square_blocks) return 4 * SquareScalePitch(depth) * DivideUp(lines, kScaleBlock);
  return 4 * ScalePitch(lines) * DivideUp(depth, kScaleBlock);
}

int64_t PackedBytes(const SideLayout& side, DType type, const Layout& layout, int64_t lines) {
  if (!side.packed) return 0;
  return layout.piece_shape.batch * layout.Padded(lines) * side.pitch * SizeOf(type);
}

int64_t AccumulatorBytes(const Layout& layout) {
  const PieceShape& s = layout.piece_shape;
  return 4 * s.batch * layout.Padded(s.rows) * Layout::AccumulatorPitch(layout.Padded(s.columns));
}

void AssignOffsets(const Problem& problem, Layout& layout) {
  const PieceShape& s = layout.piece_shape;
  const Scaling scaling = layout.attempt.scaling;
  WorkspaceOffsets& p = layout.offsets;
  OffsetAllocator allocator;
  p.lhs = allocator.Take(PackedBytes(layout.lhs, layout.types.lhs, layout, s.rows));
  p.rhs = allocator.Take(PackedBytes(layout.rhs, layout.types.rhs, layout, s.columns));
  p.lhs_line_sums = allocator.Take(layout.lhs.needs_line_sums ? 4 * s.batch * s.rows : 0);
  p.rhs_line_sums = allocator.Take(layout.rhs.needs_line_sums ? 4 * s.batch * s.columns : 0);
  p.lhs_scale =
      allocator.Take(ScaleBytes(layout.lhs, scaling, layout.Padded(s.rows), problem.depth));
  p.rhs_scale =
      allocator.Take(ScaleBytes(layout.rhs, scaling, layout.Padded(s.columns), problem.depth));
  p.accumulators = allocator.Take(layout.writes_output ? 0 : AccumulatorBytes(layout));
  p.scaled_accumulators = allocator.Take(layout.splits_depth ? AccumulatorBytes(layout) : 0);
  p.reciprocal = allocator.Take(kOffsetAlignment);
  p.library = allocator.end();
}

bool TooLarge(const Layout& layout) {
  return !layout.writes_output && AccumulatorBytes(layout) > kMaxAccumulatorBytes;
}

bool Halve(int64_t& step, int64_t least) {
  if (step <= least) return false;
  step = std::max(RoundUp(DivideUp(step, 2), least), least);
  return true;
}

bool Shrink(PieceShape& piece_shape) {
  return Halve(piece_shape.batch, 1) || Halve(piece_shape.columns, kEfficientPiece) ||
         Halve(piece_shape.rows, kEfficientPiece) || Halve(piece_shape.columns, kMinPiece) ||
         Halve(piece_shape.rows, kMinPiece);
}

Status Fit(const Problem& problem, size_t workspace, Layout& layout) {
  WorkspaceOffsets& p = layout.offsets;
  const size_t library =
      std::min(kLibraryWorkspaceBytes, workspace / 2 / kOffsetAlignment * kOffsetAlignment);
  while (true) {
    AssignOffsets(problem, layout);
    const bool fits = p.library + library <= workspace;
    if (fits && !TooLarge(layout)) break;
    if (Shrink(layout.piece_shape)) continue;
    if (fits) break;
    return "its workspace has " + std::to_string(workspace) + " bytes, but it needs " +
           std::to_string(p.library + library);
  }
  p.library_bytes = library;
  p.end = p.library + library;
  return {};
}

bool SquareTiles(const Side& side) {
  return side.scale && side.tiles.tile_free == kScaleBlock && side.tiles.tile_depth == kScaleBlock;
}

// Whether the library can read the scale of a side in place.
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

bool NeedsLineSums(const Side& other, DType other_type) {
  return other.zero_point || (other.dtype == DType::kU8 && other_type == DType::kS8);
}

}  // namespace

int64_t ScalePitch(int64_t lines) { return RoundUp(lines, 4); }

int64_t SquareScalePitch(int64_t depth) { return RoundUp(DivideUp(depth, kScaleBlock), 4); }

namespace {

// Why the attempt is impossible for the problem.
Status WhyNot(const Problem& problem, const Layout& layout) {
  const int64_t step = layout.piece_shape.depth;
  if (layout.splits_depth && step == 0) {
    return "its scales split the contracted axis into pieces that do not nest, or of over " +
           std::to_string(kMaxExactDepth) + " values, which int32 does not sum exactly";
  }
  if (layout.splits_depth && (step < kMinPieceDepth || step % kBytesAligned != 0)) {
    return "its scales change every " + std::to_string(step) +
           " values along the contracted axis, but it needs a multiple of 16, at least 32";
  }
  if (layout.splits_depth && problem.out.dtype == DType::kS32) {
    return "zero points that change along the contracted axis are summed in float32, and an int32 "
           "output needs exact sums";
  }
  const Scaling scaling = layout.attempt.scaling;
  const bool fours =
      layout.Padded(problem.rows) % 4 == 0 && layout.Padded(problem.columns) % 4 == 0;
  if (scaling == Scaling::kBlocks && !fours) return "block scales need rows and columns in fours";
  const bool scales = problem.lhs.scale || problem.rhs.scale;
  const bool by_mode = scaling != Scaling::kEpilogue && scales;
  if (by_mode && !IsFloat8(layout.types.lhs)) return "the library scales FP8 operands only";
  const bool needs_direct = scaling != Scaling::kBlocks && scaling != Scaling::kEpilogue;
  if (needs_direct && !layout.writes_output)
    return "the output's rows are not a multiple of 16 bytes";
  return {};
}

void LayOutSides(const Problem& problem, Layout& layout) {
  const Scaling scaling = layout.attempt.scaling;
  const ProductTypes& types = layout.types;
  layout.lhs = MakeSide(problem.lhs, types.lhs, layout);
  layout.rhs = MakeSide(problem.rhs, types.rhs, layout);
  // The padding after the last value of a line must meet zeros on the other side too, so both sides
  // are packed.
  const bool unaligned = !Aligned(problem.depth, types.lhs) || !Aligned(problem.depth, types.rhs);
  if (unaligned) layout.lhs.packed = layout.rhs.packed = true;
  const int64_t padded = RoundUp(problem.depth, kBytesAligned);
  layout.depth = unaligned || layout.attempt.padded ? padded : problem.depth;
  for (SideLayout* side : {&layout.lhs, &layout.rhs}) {
    if (!side->packed) continue;
    side->mn_major = false;
    side->pitch = padded;
  }
  // The library has no product of two sides in square blocks.
  layout.rhs.square_blocks = scaling == Scaling::kBlocks && SquareTiles(problem.rhs);
  layout.lhs.square_blocks =
      scaling == Scaling::kBlocks && SquareTiles(problem.lhs) && !layout.rhs.square_blocks;
  layout.lhs.copies_scale = !ScaleInPlace(problem.lhs, layout.lhs, scaling);
  layout.rhs.copies_scale = !ScaleInPlace(problem.rhs, layout.rhs, scaling);
  if (types.accumulator != DType::kS32) return;
  layout.lhs.needs_line_sums = NeedsLineSums(problem.rhs, types.rhs);
  layout.rhs.needs_line_sums = NeedsLineSums(problem.lhs, types.lhs);
}

// Reads the caller's sums, if they are sums of the codes as multiplied, over all of K.
void TakeSums(const Problem& problem, Layout& layout) {
  if (layout.splits_depth) return;
  for (auto [side, type, to] : {std::tuple(&problem.lhs, layout.types.lhs, &layout.lhs),
                                std::tuple(&problem.rhs, layout.types.rhs, &layout.rhs)}) {
    to->takes_sums = to->needs_line_sums && side->sums && side->dtype == type;
    if (to->takes_sums) to->needs_line_sums = false;
  }
}

}  // namespace

Status MakeLayout(const Problem& problem, const ProductTypes& types, const Attempt& attempt,
                  size_t workspace, Layout& layout) {
  layout = Layout{};
  layout.attempt = attempt;
  layout.types = types;
  LayOutSides(problem, layout);
  layout.quantizes_output = attempt.scaling == Scaling::kScalar && LibraryCanQuantize(problem);
  const bool finished = types.accumulator == DType::kS32
                            ? IsBareIntegerSum(problem)
                            : layout.quantizes_output || LibraryCanFinish(problem);
  const bool adds = attempt.scaling == Scaling::kScalar;
  layout.writes_output =
      finished && attempt.scaling != Scaling::kEpilogue && (!problem.residual || adds) &&
      Aligned(problem.columns, problem.out.dtype) && layout.Padded(problem.rows) == problem.rows &&
      layout.Padded(problem.columns) == problem.columns;
  // The library applies the scale of a single batch index.
  const auto has_batches = [](const Side& side) {
    return !side.folded && side.tiles.batch_stride != 0;
  };
  const bool by_batch = has_batches(problem.lhs) || has_batches(problem.rhs);
  const bool single =
      attempt.scaling == Scaling::kScalar ? by_batch : attempt.scaling != Scaling::kEpilogue;
  const int64_t depth_step = PieceDepth(problem, layout);
  layout.splits_depth = depth_step != problem.depth;
  TakeSums(problem, layout);
  layout.piece_shape = {single ? 1 : std::min(problem.batch, kMaxBatches), problem.rows,
                        problem.columns, depth_step};
  JAXFP8_RETURN_IF_ERROR(WhyNot(problem, layout));
  JAXFP8_RETURN_IF_ERROR(Fit(problem, workspace, layout));
  if (!layout.quantizes_output || !problem.amax) return {};
  const PieceShape& s = layout.piece_shape;
  const bool whole = s.rows >= problem.rows && s.columns >= problem.columns;
  return whole ? "" : "the library finds the largest output of one product, not of several";
}

}  // namespace jaxfp8::cuda
