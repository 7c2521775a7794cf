#include "cuda/problem.h"

#include <algorithm>
#include <vector>

#include "common/shapes.h"

namespace jaxfp8::cuda {
namespace {

// The positions of the canonical axes among those of one side.
struct Places {
  Dims batch;
  int64_t free = -1, depth = -1;
};

// The sizes of the batch axes: one is the outer of an inner of size 1.
struct Batch {
  int64_t outer = 1, inner = 1;
};

// How an array goes along the batch (problem.h).
struct BatchStrides {
  int64_t stride = 0, jump = 0;
};

std::string Wrong(const std::string& what) {
  return what +
         ", but the CUDA library needs one free and one contracted axis on each side, one of them "
         "the last, and at most two batch axes; call it through `jaxfp8`, which brings every "
         "product into that form";
}

Status Find(const OperandSpec& side, const char* name, Places& places) {
  if (side.contracting.size() != 1 || side.batch.size() > 2 ||
      side.shape.size() != 2 + side.batch.size()) {
    return Wrong("`" + std::string(name) + "` has " + std::to_string(side.shape.size()) +
                 " axes, of them " + std::to_string(side.contracting.size()) + " contracted and " +
                 std::to_string(side.batch.size()) + " of the batch");
  }
  places.depth = side.contracting[0];
  places.batch = side.batch;
  const auto in_batch = [&](int64_t axis) {
    return std::ranges::find(places.batch, axis) != places.batch.end();
  };
  const auto last = static_cast<int64_t>(side.shape.size()) - 1;
  for (int64_t axis = 0; axis <= last; ++axis) {
    if (axis != places.depth && !in_batch(axis)) places.free = axis;
  }
  if (!in_batch(last)) return {};
  return Wrong("the last axis of `" + std::string(name) + "` is a batch axis");
}

// The sizes of the batch; axes of size 1 are shared.
Batch BatchOf(const ScaledDotSpec& spec) {
  Batch batch;
  for (size_t i = 0; i < spec.lhs.batch.size(); ++i) {
    const int64_t left = spec.lhs.shape[spec.lhs.batch[i]];
    (i == 0 ? batch.outer : batch.inner) = left == 1 ? spec.rhs.shape[spec.rhs.batch[i]] : left;
  }
  return batch;
}

// The stride along an axis of an array; 0 along an axis of size 1, which is broadcast.
class StridesOf {
 public:
  explicit StridesOf(Dims shape) : shape_(shape), strides_(Strides(shape)) {}

  int64_t operator()(int64_t axis) const { return shape_[axis] <= 1 ? 0 : strides_[axis]; }
  BatchStrides Along(Dims axes, const Batch& batch) const {
    if (axes.empty()) return {};
    if (axes.size() == 1 || batch.inner <= 1) return {(*this)(axes[0]), 0};
    const int64_t outer = (*this)(axes[0]), inner = (*this)(axes[1]);
    return {inner, batch.outer <= 1 ? 0 : outer - batch.inner * inner};
  }

 private:
  Dims shape_;
  std::vector<int64_t> strides_;
};

Tiles MakeTiles(const OperandSpec& spec, const Places& places, const Batch& batch) {
  const std::vector<int64_t> counts = TileCounts(spec);
  const StridesOf stride(counts);
  const auto [along, jump] = stride.Along(places.batch, batch);
  return {.tile_free = spec.tiles[places.free],
          .tile_depth = spec.tiles[places.depth],
          .batch_stride = along,
          .free_stride = stride(places.free),
          .depth_stride = stride(places.depth),
          .batch_jump = jump};
}

Status WhyNotBatch(const OperandSpec& spec, const char* name, const Batch& batch) {
  const bool tiled = spec.scale || spec.zero_point;
  int shared = 0;
  for (int64_t axis : spec.batch) {
    const int64_t size = spec.shape[axis], tile = spec.tiles[axis];
    shared += size == 1;
    if (size <= 1 || !tiled || tile == 1 || tile >= size) continue;
    return Wrong("`" + std::string(name) + "_tiles` is " + std::to_string(tile) +
                 " along the batch, neither 1 nor all");
  }
  if (shared != 1 || batch.outer == 1 || batch.inner == 1) return {};
  return Wrong("`" + std::string(name) + "` is shared along one of two batch axes");
}

Status MakeSide(const OperandSpec& spec, const char* name, const Places& places, const Batch& batch,
                Side& side) {
  JAXFP8_RETURN_IF_ERROR(WhyNotBatch(spec, name, batch));
  const auto behind = [&](int64_t axis) { return axis > places.free; };
  if (spec.sums && std::ranges::any_of(places.batch, behind)) {
    return Wrong("`" + std::string(name) + "_sums` is given for a batch behind the free axis");
  }
  const std::vector<int64_t> strides = Strides(spec.shape);
  const auto [along, jump] = StridesOf(spec.shape).Along(places.batch, batch);
  side.dtype = ParseDType(spec.dtype);
  side.batch_stride = along, side.batch_jump = jump;
  side.free_stride = strides[places.free];
  side.depth_stride = strides[places.depth];
  side.scale = spec.scale;
  side.zero_point = spec.zero_point;
  side.scale_rounded = spec.scale_rounded;
  side.sums = spec.sums;
  if (spec.scale || spec.zero_point) side.tiles = MakeTiles(spec, places, batch);
  return {};
}

// An array of the epilogue. Its batch axes come first; one stride has to lead along both.
struct PlaneMaker {
  Batch batch;
  int64_t axes;  // of the batch
  Status status;

  Plane operator()(bool given, DType dtype, Dims shape, const char* name) {
    if (!given) return {};
    constexpr int64_t kFirst[] = {0, 1};
    const StridesOf stride(shape);
    const auto [along, jump] = stride.Along({kFirst, static_cast<size_t>(axes)}, batch);
    if (jump != 0 && status.ok()) {
      status = Wrong("`" + std::string(name) + "` is shared along one of two batch axes");
    }
    return {.dtype = dtype,
            .batch_stride = along,
            .row_stride = stride(axes),
            .column_stride = stride(axes + 1)};
  }
};

}  // namespace

Status MakeProblem(const Request& request, Problem& problem) {
  const ScaledDotSpec& spec = request.spec;
  Places left, right;
  JAXFP8_RETURN_IF_ERROR(Find(spec.lhs, "lhs", left));
  JAXFP8_RETURN_IF_ERROR(Find(spec.rhs, "rhs", right));
  const Batch batch = BatchOf(spec);
  JAXFP8_RETURN_IF_ERROR(MakeSide(spec.lhs, "lhs", left, batch, problem.lhs));
  JAXFP8_RETURN_IF_ERROR(MakeSide(spec.rhs, "rhs", right, batch, problem.rhs));
  const auto type = [](const OperandSpec& side, DType given) {
    return side.scale_exponents ? DType::kU8 : given;
  };
  problem.lhs.scale_type = type(spec.lhs, request.lhs_scale_type);
  problem.rhs.scale_type = type(spec.rhs, request.rhs_scale_type);
  problem.batch = batch.outer * batch.inner;
  const bool jumps = !problem.lhs.HasOneBatchStride() || !problem.rhs.HasOneBatchStride();
  problem.inner_batch = jumps ? batch.inner : 1;
  problem.rows = spec.lhs.shape[left.free];
  problem.columns = spec.rhs.shape[right.free];
  problem.depth = spec.lhs.shape[left.depth];
  const EpilogueSpec& e = spec.epilogue;
  PlaneMaker plane{batch, static_cast<int64_t>(left.batch.size()), {}};
  problem.residual = plane(e.has_residual, ParseDType(e.residual_dtype), e.residual, "residual");
  problem.bias = plane(e.has_bias, DType::kF32, e.bias, "bias");
  problem.out_scale = plane(e.has_out_scale, DType::kF32, e.out_scale, "out_scale");
  problem.amax = plane(e.has_amax, DType::kF32, e.amax, "amax");
  problem.out = {.dtype = ParseDType(e.out_dtype),
                 .batch_stride = problem.rows * problem.columns,
                 .row_stride = problem.columns,
                 .column_stride = 1};
  problem.activation = ParseActivation(e.activation);
  problem.highest = spec.precision == "highest";
  return plane.status;
}

std::string TypesOf(const Problem& problem) {
  return std::string(NameOf(problem.lhs.dtype)) + " and " + std::string(NameOf(problem.rhs.dtype));
}

double LinesOf(const Problem& problem, const Side& side) {
  const int64_t lines = &side == &problem.lhs ? problem.rows : problem.columns;
  return static_cast<double>(side.batch_stride == 0 ? 1 : problem.batch) *
         static_cast<double>(lines);
}

Problem WithEvenGroups(const Problem& problem) {
  if (problem.grouping == Grouping::kNone) return problem;
  Problem even = problem;
  even.grouping = Grouping::kNone;
  const bool on_right = IsEightBit(problem.lhs.dtype) && !IsEightBit(problem.rhs.dtype);
  int64_t& grouped = !GroupsRows(problem) ? even.depth : on_right ? even.columns : even.rows;
  const int64_t groups = std::max<int64_t>(problem.batch, 1);
  grouped = (grouped + groups - 1) / groups;
  return even;
}

Status WhyNotGroups(const Problem& problem) {
  if (problem.batch < 1) return "there are no groups";
  const bool contracted = problem.grouping == Grouping::kContracted;
  const bool epilogue = problem.residual || problem.bias || problem.out_scale || problem.amax ||
                        problem.activation != Activation::kNone;
  if (contracted && epilogue) return "groups along the contracted axis have no epilogue";
  if (problem.bias.row_stride != 0) return "a group has one row of bias";
  if (problem.residual.batch_stride != 0 || problem.out_scale.batch_stride != 0) {
    return "`residual` and `out_scale` have rows of all groups, and no batch stride";
  }
  if (problem.amax.batch_stride != 0 || problem.amax.row_stride != 0 ||
      problem.amax.column_stride != 0) {
    return "`amax` is one for all groups";
  }
  const auto has_batches = [](const Side& side) {
    return side.batch_stride != 0 || side.tiles.batch_stride != 0;
  };
  if (has_batches(problem.lhs) ||
      (contracted ? has_batches(problem.rhs) : problem.out.batch_stride != 0)) {
    return "what the groups divide cannot have a batch stride";
  }
  if (problem.grouping == Grouping::kMasked && problem.rows % problem.batch != 0) {
    return "masked groups have to have as many rows each";
  }
  return {};
}

bool FoldsScale(const Side& side) {
  constexpr int64_t kChunk = 8;  // values that are decoded with one scale
  const Tiles& tiles = side.tiles;
  return side.HasExponents() && IsEightBit(side.dtype) && !side.zero_point &&
         (tiles.ConstantAlongDepth() || tiles.tile_depth % kChunk == 0);
}

Side Folded(Side side) {
  side.scale = false, side.folded = true;
  side.scale_type = DType::kF32;
  return side;
}

Problem WithFoldedScales(Problem problem) {
  for (Side* side : {&problem.lhs, &problem.rhs}) {
    if (FoldsScale(*side)) *side = Folded(*side);
  }
  return problem;
}

Problem Swapped(const Problem& problem) {
  Problem out = problem;
  std::swap(out.rows, out.columns);
  std::swap(out.lhs, out.rhs);
  for (Plane* plane : {&out.residual, &out.bias, &out.out_scale, &out.amax, &out.out}) {
    std::swap(plane->row_stride, plane->column_stride);
  }
  return out;
}

Buffers Swapped(const Buffers& buffers) {
  Buffers out = buffers;
  std::swap(out.lhs, out.rhs);
  std::swap(out.lhs_scale, out.rhs_scale);
  std::swap(out.lhs_zero_point, out.rhs_zero_point);
  std::swap(out.lhs_sums, out.rhs_sums);
  return out;
}

}  // namespace jaxfp8::cuda
