#include "cuda/problem.h"

#include <algorithm>
#include <vector>

#include "common/shapes.h"

namespace jaxfp8::cuda {
namespace {

// The positions of the canonical axes among those of one side; -1 if there is no batch axis.
struct Places {
  int64_t batch = -1, free = -1, depth = -1;
};

std::string Wrong(const std::string& what) {
  return "`jaxfp8_scaled_dot`: " + what +
         ", but the CUDA library needs one free and one contracted axis on each side, one of them "
         "the last, and at most one batch axis; call it through `jaxfp8`, which brings every "
         "product into that form";
}

std::string Find(const OperandSpec& side, const char* name, Places& places) {
  if (side.contracting.size() != 1 || side.batch.size() > 1 ||
      side.shape.size() != 2 + side.batch.size()) {
    return Wrong("`" + std::string(name) + "` has " + std::to_string(side.shape.size()) +
                 " axes, of them " + std::to_string(side.contracting.size()) + " contracted and " +
                 std::to_string(side.batch.size()) + " of the batch");
  }
  places.depth = side.contracting[0];
  if (!side.batch.empty()) places.batch = side.batch[0];
  for (int64_t axis = 0; axis < static_cast<int64_t>(side.shape.size()); ++axis) {
    if (axis != places.depth && axis != places.batch) places.free = axis;
  }
  const auto last = static_cast<int64_t>(side.shape.size()) - 1;
  if (places.batch != last) return "";
  return Wrong("the last axis of `" + std::string(name) + "` is a batch axis");
}

Tiles MakeTiles(const OperandSpec& spec, const Places& places) {
  const std::vector<int64_t> counts = TileCounts(spec);
  const std::vector<int64_t> strides = Strides(counts);
  const auto stride = [&](int64_t axis) {
    return axis < 0 || counts[axis] <= 1 ? 0 : strides[axis];
  };
  return {spec.tiles[places.free], spec.tiles[places.depth], stride(places.batch),
          stride(places.free), stride(places.depth)};
}

std::string MakeSide(const OperandSpec& spec, const char* name, const Places& places, Side& side) {
  const bool batched = places.batch >= 0 && spec.shape[places.batch] > 1;
  const bool tiled = spec.scale || spec.zero_point;
  if (batched && tiled && spec.tiles[places.batch] != 1 &&
      spec.tiles[places.batch] < spec.shape[places.batch]) {
    return Wrong("`" + std::string(name) + "_tiles` is " +
                 std::to_string(spec.tiles[places.batch]) + " along the batch, neither 1 nor all");
  }
  const std::vector<int64_t> strides = Strides(spec.shape);
  side.dtype = ParseDType(spec.dtype);
  side.batch = batched ? strides[places.batch] : 0;
  side.free = strides[places.free];
  side.depth = strides[places.depth];
  side.scale = spec.scale;
  side.zero_point = spec.zero_point;
  side.scale_rounded = spec.scale_rounded;
  if (tiled) side.tiles = MakeTiles(spec, places);
  return "";
}

// Axes of size 1 are broadcast.
//   batched  the first axis is the batch
Plane MakePlane(bool given, DType dtype, Dims shape, bool batched) {
  if (!given) return {};
  const std::vector<int64_t> strides = Strides(shape);
  const size_t row = batched ? 1 : 0;
  const auto stride = [&](size_t axis) { return shape[axis] <= 1 ? 0 : strides[axis]; };
  return {dtype, batched ? stride(0) : 0, stride(row), stride(row + 1)};
}

}  // namespace

std::string MakeProblem(const ScaledDotSpec& spec, Problem& problem) {
  Places left, right;
  std::string wrong = Find(spec.lhs, "lhs", left);
  if (wrong.empty()) wrong = Find(spec.rhs, "rhs", right);
  if (wrong.empty()) wrong = MakeSide(spec.lhs, "lhs", left, problem.lhs);
  if (wrong.empty()) wrong = MakeSide(spec.rhs, "rhs", right, problem.rhs);
  if (!wrong.empty()) return wrong;
  const bool batched = left.batch >= 0;
  const int64_t lhs_batch = batched ? spec.lhs.shape[left.batch] : 1;
  problem.batch = lhs_batch == 1 && batched ? spec.rhs.shape[right.batch] : lhs_batch;
  problem.rows = spec.lhs.shape[left.free];
  problem.columns = spec.rhs.shape[right.free];
  problem.depth = spec.lhs.shape[left.depth];
  const EpilogueSpec& e = spec.epilogue;
  problem.residual = MakePlane(e.has_residual, ParseDType(e.residual_dtype), e.residual, batched);
  problem.bias = MakePlane(e.has_bias, DType::kF32, e.bias, batched);
  problem.out_scale = MakePlane(e.has_out_scale, DType::kF32, e.out_scale, batched);
  problem.amax = MakePlane(e.has_amax, DType::kF32, e.amax, batched);
  problem.out = {ParseDType(e.out_dtype), problem.rows * problem.columns, problem.columns, 1};
  problem.activation = ParseActivation(e.activation);
  problem.highest = spec.precision == "highest";
  return "";
}

Problem Swapped(const Problem& problem) {
  Problem out = problem;
  std::swap(out.rows, out.columns);
  std::swap(out.lhs, out.rhs);
  for (Plane* plane : {&out.residual, &out.bias, &out.out_scale, &out.amax, &out.out}) {
    std::swap(plane->row, plane->column);
  }
  return out;
}

Buffers Swapped(const Buffers& buffers) {
  Buffers out = buffers;
  std::swap(out.lhs, out.rhs);
  std::swap(out.lhs_scale, out.rhs_scale);
  std::swap(out.lhs_zero_point, out.rhs_zero_point);
  return out;
}

}  // namespace jaxfp8::cuda
