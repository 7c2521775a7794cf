#include <algorithm>
#include <utility>

#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/row_batch.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/kernels/sm90/plan.h"
#include "cuda/kernels/sm90/tensor_map.h"
#include "cuda/kernels/sm90_gemm/path.h"

namespace jaxfp8::cuda::sm90 {
namespace {

//   sums  of the lines, if they are given
ZeroPoints ZerosOf(const TmaOperand& operand, const int32_t* zero_point, const int32_t* sums,
                   const Buffers& buffers) {
  ZeroPoints zeros;
  if (operand.side.zero_point) zeros.zero_point = zero_point;
  if (operand.summed) {
    sums = reinterpret_cast<const int32_t*>(static_cast<const char*>(buffers.workspace) +
                                            operand.sums_at);
  }
  zeros.line_sums = sums;
  zeros.sums_batch = operand.batches > 1 ? operand.lines : 0;
  return zeros;
}

// Whether the output is the cast sum, and each row of it consists of 16 aligned bytes. What scales
// sums after all of K adds a bias of the columns.
bool StoresDirectly(const Problem& problem, const Buffers& buffers) {
  const Plane& out = problem.out;
  const bool adds = problem.bias && !(SumsFirst(problem) && problem.bias.row_stride == 0);
  const bool rest = problem.residual || adds || problem.out_scale || problem.amax ||
                    problem.activation != Activation::kNone;
  const int64_t size = SizeOf(out.dtype);
  return !rest && IsWideFloat(out.dtype) && out.column_stride == 1 &&
         !(IsMixed(problem) && size == 4) &&
         AlignmentOf(buffers.out, {out.row_stride * size, out.batch_stride * size,
                                   problem.columns * size}) == 16;
}

Status Copy(const TmaOperand& operand, const void* values, const Buffers& buffers,
            cudaStream_t stream) {
  if (!operand.copied) return {};
  PackRequest request;
  request.side = operand.side;
  request.lines = {0, operand.batches, 0, operand.lines, operand.depth};
  request.out = operand.side.dtype;
  request.count_padded = operand.lines;
  request.depth_padded = operand.LinePitch();
  return LaunchPack(request, values, static_cast<char*>(buffers.workspace) + operand.at, stream);
}

Status SumLines(const TmaOperand& operand, const void* values, const Buffers& buffers,
                cudaStream_t stream) {
  if (!operand.summed) return {};
  auto* sums = static_cast<char*>(buffers.workspace) + operand.sums_at;
  return LaunchLineSums(operand.side, {0, operand.batches, 0, operand.lines, operand.depth}, false,
                        values, reinterpret_cast<int32_t*>(sums), stream);
}

}  // namespace

StepScales ScalesOf(const Side& side, const float* scale, int64_t lines, int32_t steps,
                    int64_t depth) {
  StepScales s;
  s.last_line = static_cast<int32_t>(lines - 1);
  if (!side.scale && !side.zero_point) return s;
  const Tiles& tiles = side.tiles;
  if (side.scale) s.scale = scale;
  s.batch_stride = tiles.batch_stride, s.line_stride = tiles.free_stride;
  s.step_stride = tiles.depth_stride;
  s.tile_lines = Divisor(static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_free, 1, lines)));
  const int64_t per_scale = tiles.ConstantAlongDepth() ? steps : tiles.tile_depth / depth;
  s.steps_per_scale = Divisor(static_cast<int32_t>(std::clamp<int64_t>(per_scale, 1, steps)));
  s.form = ScaleFormOf(side);
  s.fours = s.steps_per_scale.divisor == 1 && s.step_stride == 1 &&
            AlignmentOf(scale, {4 * s.batch_stride, 4 * s.line_stride}) == 16;
  return s;
}

HopperPlan::HopperPlan(const Problem& problem, const Configuration& configuration,
                       const TileSchedule& schedule, int32_t depth, const Device& device)
    : problem_(problem),
      configuration_(configuration),
      schedule_(schedule),
      depth_(depth),
      multiprocessors_(device.multiprocessors),
      operands_(OperandsOf(problem)) {}

Status HopperPlan::Prepare(size_t workspace) {
  JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(workspace, operands_.workspace));
  UseWorkspace(workspace);
  ctas_ = CtasOf(schedule_, multiprocessors_);
  kernel_ = KernelOf();
  if (!kernel_.function) return "there is no tile of this shape";
  // Without code for sm_90a the driver translates a kernel that does nothing.
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel_.function);
  if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
  if (attributes.ptxVersion != 90)
    return "the library has no code for sm_90a; build it with JAXFP8_CUDA_ARCHITECTURES=90a-real";
  return CudaError(
      cudaFuncSetAttribute(kernel_.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kernel_.shared_bytes),
      "cudaFuncSetAttribute");
}

Status HopperPlan::Run(const Buffers& buffers, cudaStream_t stream) const {
  JAXFP8_RETURN_IF_ERROR(ClearAmax(problem_, buffers, stream));
  if (schedule_.units == 0) return {};
  JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, operands_.workspace));
  JAXFP8_RETURN_IF_ERROR(Clear(buffers, stream));
  JAXFP8_RETURN_IF_ERROR(Copy(operands_.lhs, buffers.lhs, buffers, stream));
  JAXFP8_RETURN_IF_ERROR(Copy(operands_.rhs, buffers.rhs, buffers, stream));
  JAXFP8_RETURN_IF_ERROR(SumLines(operands_.lhs, buffers.lhs, buffers, stream));
  JAXFP8_RETURN_IF_ERROR(SumLines(operands_.rhs, buffers.rhs, buffers, stream));
  return Launch(buffers, stream);
}

Status HopperPlan::Map(const TmaOperand& operand, const void* values, const Buffers& buffers,
                       int box_lines, CUtensorMap& map) const {
  MappedOperand mapped;
  mapped.values =
      operand.copied ? static_cast<const char*>(buffers.workspace) + operand.at : values;
  mapped.depth = operand.LineBytes(), mapped.lines = operand.lines,
  mapped.batches = operand.batches;
  mapped.line_pitch = operand.LinePitch(), mapped.batch_pitch = operand.BatchPitch();
  if (reinterpret_cast<uintptr_t>(mapped.values) % kOperandAlignment != 0) {
    return "an operand does not lie at a multiple of 16 bytes";
  }
  if (operand.mn_major) {
    std::swap(mapped.depth, mapped.lines);
    return MapOperand(mapped, kWgmmaRows, depth_, map);
  }
  return MapOperand(mapped, depth_ * SizeOf(operand.side.dtype), box_lines, map);
}

Status HopperPlan::MapOutput(const Arguments& a, CUtensorMap& map) const {
  const Plane& plane = a.epilogue.elementwise.out_plane;
  const int64_t rows = a.epilogue.rows, columns = a.epilogue.columns;
  const int64_t row = 2 * (rows == 1 ? columns : plane.row_stride);
  const int64_t batch = a.out_batched ? 2 * plane.batch_stride : rows * row;
  return sm90::MapOutput(a.epilogue.elementwise.out, rows, columns,
                         a.out_batched ? problem_.batch : 1, row, batch, map);
}

Arguments HopperPlan::ArgumentsFor(const Buffers& buffers) const {
  Arguments a;
  const int64_t rows = problem_.rows, columns = problem_.columns;
  a.schedule = schedule_;
  a.group_sizes = buffers.group_sizes;
  a.lhs_scales = ScalesOf(problem_.lhs, buffers.lhs_scale, rows, schedule_.steps, kStepDepth);
  a.rhs_scales = ScalesOf(problem_.rhs, buffers.rhs_scale, columns, schedule_.steps, kStepDepth);
  if (problem_.grouping == Grouping::kContracted) {  // groups begin at any step
    a.lhs_scales.fours = a.rhs_scales.fours = false;
  }
  a.lhs_zeros = ZerosOf(operands_.lhs, buffers.lhs_zero_point, buffers.lhs_sums, buffers);
  a.rhs_zeros = ZerosOf(operands_.rhs, buffers.rhs_zero_point, buffers.rhs_sums, buffers);
  a.has_zeros = problem_.lhs.zero_point || problem_.rhs.zero_point;
  a.lhs_batched = operands_.lhs.batches > 1, a.rhs_batched = operands_.rhs.batches > 1;
  const Problem stored = Stored();
  a.epilogue = Epilogue{};
  a.epilogue.rows = stored.rows, a.epilogue.columns = stored.columns;
  a.epilogue.depth = stored.depth;
  a.epilogue.elementwise = MakeElementwise(stored, buffers);
  a.out_batched = stored.batch > 1 && stored.out.batch_stride != 0;
  a.stores_directly = StoresDirectly(stored, buffers);
  a.stores_boxes = a.stores_directly && kernel_.has_boxes && SizeOf(stored.out.dtype) == 2;
  a.stores_fours = stored.columns % 4 == 0 && FitsRowBatch(a.epilogue.elementwise);
  Complete(buffers, a);
  return a;
}

Status HopperPlan::Launch(const Buffers& buffers, cudaStream_t stream) const {
  const Pair pair = configuration_.pair;
  const TileShape tile = configuration_.tile;
  CUtensorMap lhs, rhs, out = {};
  const Arguments arguments = ArgumentsFor(buffers);
  JAXFP8_RETURN_IF_ERROR(Map(operands_.lhs, buffers.lhs, buffers,
                             tile.rows / (pair == Pair::kSharesLhs ? 2 : 1), lhs));
  JAXFP8_RETURN_IF_ERROR(Map(operands_.rhs, buffers.rhs, buffers,
                             tile.columns / (pair == Pair::kSharesRhs ? 2 : 1), rhs));
  if (arguments.stores_boxes) JAXFP8_RETURN_IF_ERROR(MapOutput(arguments, out));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas_));
  config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel_.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute, config.numAttrs = pair == Pair::kNone ? 0 : 1;
  return CudaError(cudaLaunchKernelEx(&config, kernel_.function, arguments, lhs, rhs, out),
                   "sm90_gemm");
}

}  // namespace jaxfp8::cuda::sm90
