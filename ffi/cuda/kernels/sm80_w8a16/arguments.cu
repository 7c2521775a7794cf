// The arguments of `sm80_w8a16` for a problem and the buffers of a call.

#include <algorithm>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"

namespace jaxfp8::cuda::w8a16 {
namespace {

// Whether a pointer is a multiple of `to`, with any multiples of the steps added.
bool Aligned(const void* pointer, int64_t to, std::initializer_list<int64_t> steps) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % to == 0;
  for (int64_t step : steps) aligned = aligned && step % to == 0;
  return aligned;
}

int32_t WeightAccessBytes(const Problem& problem, const Buffers& buffers) {
  const int64_t line = problem.rhs.IsMnMajor() ? problem.rhs.depth_stride : problem.rhs.free_stride;
  for (int access_bytes : {16, 4}) {
    const bool aligned = Aligned(buffers.rhs, access_bytes,
                                 {line, problem.rhs.batch_stride, problem.rhs.batch_jump});
    if (aligned) return access_bytes;
  }
  return 1;
}

bool ActivationsVectorized(const Problem& problem, const Buffers& buffers) {
  const int64_t size = SizeOf(problem.lhs.dtype);
  return problem.lhs.depth_stride == 1 &&
         Aligned(buffers.lhs, 8 * SizeOf(problem.lhs.dtype),
                 {size * problem.lhs.free_stride, size * problem.lhs.batch_stride});
}

// Whether a stage has whole runs of fine scales, of 4 bytes at least and aligned to their size.
bool HasFineRuns(const Problem& problem, const Buffers& buffers) {
  const Tiles& tiles = problem.rhs.tiles;
  const bool by_columns = problem.rhs.IsMnMajor();
  const int64_t size = BytesOf(ScaleFormOf(problem.rhs));
  const int64_t run = size * (by_columns ? 4 : kTileDepth / tiles.tile_depth);
  const bool neighbours =
      by_columns ? tiles.free_stride == 1 && tiles.tile_free == 1 : tiles.depth_stride == 1;
  const int64_t step = by_columns ? tiles.depth_stride : tiles.free_stride;
  return neighbours && run >= 4 &&
         Aligned(buffers.rhs_scale, run,
                 {size * step, size * tiles.batch_stride, size * tiles.batch_jump});
}

uint32_t SignFlip(const Problem& problem) {
  return problem.lhs.dtype == DType::kBF16
             ? Decoder<DType::kS8, DType::kBF16>::SignFlip(problem.rhs.dtype)
             : Decoder<DType::kS8, DType::kF16>::SignFlip(problem.rhs.dtype);
}

EpilogueArguments EpilogueArgumentsFor(const Problem& problem, const Buffers& buffers) {
  EpilogueArguments e;
  e.elementwise = MakeElementwise(problem, buffers);
  e.plain = HasPlainEpilogue(problem);
  // With K = 0 there are no tiles along K and no scales.
  if (problem.lhs.scale && problem.depth > 0) e.row_scales = buffers.lhs_scale;
  e.row_tiles = problem.lhs.tiles;
  e.wide = problem.lhs, e.weight = problem.rhs;
  return e;
}

// The instance that a launch of a problem takes: fine scales and groups have their own.
Launch InstanceOf(const Problem& problem, Launch launch) {
  if (launch == Launch::kGated) return launch;
  if (HasFineScales(problem)) return Launch::kFine;
  return GroupsRows(problem) ? Launch::kGroups : launch;
}

template <DType kWeight>
KernelFunction KernelOfWeights(const Problem& problem, Launch launch) {
  using enum Launch;
  return Visit<kOne, kSeveral, kGated, kGroups, kFine>(
      launch, KernelFunction{nullptr}, [&]<Launch kLaunch>() {
        return KernelFor<kWeight, kLaunch>(problem.lhs.dtype, problem.rhs.IsMnMajor(),
                                           RowFragmentsFor(problem));
      });
}

}  // namespace

KernelFunction KernelOf(const Problem& problem, Launch launch) {
  const Launch instance = InstanceOf(problem, launch);
  switch (problem.rhs.dtype) {
    case DType::kE4M3:
      return KernelOfWeights<DType::kE4M3>(problem, instance);
    case DType::kE5M2:
      return KernelOfWeights<DType::kE5M2>(problem, instance);
    default:
      return KernelOfWeights<DType::kS8>(problem, instance);
  }
}

Arguments ArgumentsFor(const Problem& problem, const Buffers& buffers) {
  Arguments a;
  const Side &weights = problem.rhs, &wide = problem.lhs;
  const Tiles& tiles = weights.tiles;
  a.rows = static_cast<int32_t>(problem.rows), a.columns = static_cast<int32_t>(problem.columns);
  a.depth = static_cast<int32_t>(problem.depth);
  a.weight_access_bytes = WeightAccessBytes(problem, buffers);
  a.activations_vectorized = ActivationsVectorized(problem, buffers);
  a.weights = static_cast<const uint8_t*>(buffers.rhs);
  a.activations = buffers.lhs;
  a.weight_pitch = weights.IsMnMajor() ? weights.depth_stride : weights.free_stride;
  a.weight_batch = weights.batch_stride;
  a.activation_row = wide.free_stride, a.activation_depth = wide.depth_stride,
  a.activation_batch = wide.batch_stride;
  if (weights.scale && problem.depth > 0) {
    a.scales = buffers.rhs_scale;
    a.scale_form = ScaleFormOf(weights);
  }
  if (weights.zero_point && problem.depth > 0) a.zero_points = buffers.rhs_zero_point;
  a.scale_batch = tiles.batch_stride, a.scale_depth = tiles.depth_stride;
  a.weight_jump = weights.batch_jump, a.scale_jump = tiles.batch_jump;
  a.inner_batch = static_cast<int32_t>(problem.inner_batch);
  a.group_sizes = buffers.group_sizes;
  a.groups = GroupsOf(problem, 8 * RowFragmentsFor(problem));
  a.scale_column = static_cast<int32_t>(tiles.free_stride);
  // A scale's tile may be longer than its axis.
  const int64_t depths = std::max<int64_t>(1, (problem.depth + kTileDepth - 1) / kTileDepth);
  a.depth_tiles_per_scale = static_cast<int32_t>(
      tiles.ConstantAlongDepth() ? depths : std::min(tiles.tile_depth / kTileDepth, depths));
  if (HasFineScales(problem)) {
    a.fine_depth = static_cast<int32_t>(tiles.tile_depth);
    a.fine_runs = HasFineRuns(problem, buffers);
  }
  a.tile_columns = static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_free, 1, problem.columns));
  a.sign_flip = SignFlip(problem);
  a.weight = weights.dtype;
  a.has_zero_points = weights.zero_point || weights.dtype == DType::kU8;  // uint8 is int8 plus 128
  a.epilogue = EpilogueArgumentsFor(problem, buffers);
  return a;
}

}  // namespace jaxfp8::cuda::w8a16
