// The host side of path `sm90_gemm`: arguments and launches.

#include <algorithm>
#include <utility>

#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/row_batch.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/kernels/sm90/tensor_map.h"
#include "cuda/kernels/sm90_gemm/arguments.h"
#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/kernels/sm90_gemm/schedule.h"

namespace jaxfp8::cuda {
namespace sm90 {
namespace {

// Whether whole parts of 128 columns have one scale.
bool HasBlocks(const Side& rhs) {
  return !rhs.scale || rhs.tiles.ConstantAlongFree() || rhs.tiles.tile_free % kStepDepth == 0;
}

//   depth  of a step
StepScales ScalesOf(const Side& side, const float* scale, int64_t lines, int32_t steps,
                    int64_t depth = kStepDepth) {
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

//   sums  of the lines, if they are given
ZeroPoints ZerosOf(const Operand& operand, const int32_t* zero_point, const int32_t* sums,
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

// What `PickBytes` needs of two words of codes for the registers of a fragment: two codes each,
// sign-extended to 16 bits. Codes of a row are neighbours; of lines of N, those of a depth are.
void PickCodes(bool mn_major, uint32_t (&picks)[4]) {
  constexpr uint32_t kRows[4][2] = {{0, 1}, {4, 5}, {2, 3}, {6, 7}};
  constexpr uint32_t kColumns[4][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}};
  for (int i = 0; i < 4; ++i) {
    const auto& [low, high] = mn_major ? kColumns[i] : kRows[i];
    picks[i] = low | (8 | low) << 4 | high << 8 | (8 | high) << 12;
  }
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

class GemmPlan final : public Plan {
 public:
  GemmPlan(const Problem& problem, const Device& device)
      : problem_(WithWeightsOnLeft(problem)),
        mixed_(IsMixed(problem)),
        swapped_(HasWeightsOnRight(problem)),
        configuration_(Choose(problem_, device.multiprocessors)),
        schedule_(MakeSchedule(problem_, configuration_)),
        multiprocessors_(device.multiprocessors),
        operands_(OperandsOf(problem_)) {}

  // The kernel where one side has 16 bits.
  Kernel MixedKernel() const {
    const DType wide = problem_.rhs.dtype;
    switch (problem_.lhs.dtype) {
      case DType::kE4M3:
        return E4M3WeightsKernel(wide, configuration_.tile);
      case DType::kE5M2:
        return E5M2WeightsKernel(wide, configuration_.tile);
      default:
        return S8WeightsKernel(wide, configuration_.tile);
    }
  }

  Kernel KernelOf() const {
    const DType lhs = problem_.lhs.dtype, rhs = problem_.rhs.dtype;
    const TileShape tile = configuration_.tile;
    if (mixed_) return MixedKernel();
    if (IsFloat8(lhs) && SumsFirst(problem_)) return Float8SumsKernel(lhs, rhs, tile);
    const Scaling scaling = HasBlocks(problem_.rhs) ? Scaling::kBlocks : Scaling::kLines;
    switch (lhs) {
      case DType::kS8:
        return S8Kernel(rhs, tile);
      case DType::kU8:
        return U8Kernel(rhs, tile);
      case DType::kE4M3:
        return E4M3Kernel(rhs, scaling, tile);
      default:
        return E5M2Kernel(rhs, scaling, tile);
    }
  }

  // Fits the kernel to the device.
  Status Prepare(size_t workspace) {
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(operands_, workspace));
    Share(workspace);
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

  // Has blocks share units if the workspace has room for their sums. It holds nothing else then:
  // mixed operands are not copied.
  void Share(size_t workspace) {
    Schedule shared = schedule_;
    ShareUnits(problem_, configuration_, multiprocessors_, shared);
    const size_t bytes = SharedUnitsBytes(shared, configuration_.tile, multiprocessors_);
    if (bytes <= workspace) schedule_ = shared, shared_bytes_ = bytes;
    blocks_ = BlocksOf(schedule_, multiprocessors_);
  }

  Status Run(const Buffers& given, cudaStream_t stream) const override {
    const Buffers buffers = swapped_ ? Swapped(given) : given;
    JAXFP8_RETURN_IF_ERROR(ClearAmax(problem_, buffers, stream));
    if (schedule_.units == 0) return {};
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(operands_, buffers.workspace_bytes));
    JAXFP8_RETURN_IF_ERROR(ClearCounters(buffers, stream));
    JAXFP8_RETURN_IF_ERROR(Copy(operands_.lhs, buffers.lhs, buffers, stream));
    JAXFP8_RETURN_IF_ERROR(Copy(operands_.rhs, buffers.rhs, buffers, stream));
    JAXFP8_RETURN_IF_ERROR(SumLines(operands_.lhs, buffers.lhs, buffers, stream));
    JAXFP8_RETURN_IF_ERROR(SumLines(operands_.rhs, buffers.rhs, buffers, stream));
    return Launch(buffers, stream);
  }

 private:
  Status ClearCounters(const Buffers& buffers, cudaStream_t stream) const {
    if (shared_bytes_ == 0) return {};
    if (buffers.workspace_bytes < shared_bytes_) {
      return "it was planned for a workspace of " + std::to_string(shared_bytes_) +
             " bytes and got " + std::to_string(buffers.workspace_bytes);
    }
    return CudaError(cudaMemsetAsync(buffers.workspace, 0, blocks_ * kCounterBytes, stream),
                     "cudaMemsetAsync");
  }

  static Status Copy(const Operand& operand, const void* values, const Buffers& buffers,
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

  static Status SumLines(const Operand& operand, const void* values, const Buffers& buffers,
                         cudaStream_t stream) {
    if (!operand.summed) return {};
    auto* sums = static_cast<char*>(buffers.workspace) + operand.sums_at;
    return LaunchLineSums(operand.side, {0, operand.batches, 0, operand.lines, operand.depth},
                          false, values, reinterpret_cast<int32_t*>(sums), stream);
  }

  Status Map(const Operand& operand, const void* values, const Buffers& buffers, int box_lines,
             CUtensorMap& map) const {
    MappedOperand mapped;
    mapped.values =
        operand.copied ? static_cast<const char*>(buffers.workspace) + operand.at : values;
    mapped.depth = operand.LineBytes(), mapped.lines = operand.lines,
    mapped.batches = operand.batches;
    mapped.line_pitch = operand.LinePitch(), mapped.batch_pitch = operand.BatchPitch();
    if (reinterpret_cast<uintptr_t>(mapped.values) % kOperandAlignment != 0) {
      return "an operand does not lie at a multiple of 16 bytes";
    }
    const int depth = mixed_ ? kMixedDepth : kStepDepth;
    if (operand.mn_major) {
      std::swap(mapped.depth, mapped.lines);
      return MapOperand(mapped, kWgmmaRows, depth, map);
    }
    return MapOperand(mapped, depth * SizeOf(operand.side.dtype), box_lines, map);
  }

  Status MapOutput(const Arguments& a, CUtensorMap& map) const {
    const Plane& plane = a.epilogue.elementwise.out_plane;
    const int64_t rows = a.epilogue.rows, columns = a.epilogue.columns;
    const int64_t row = 2 * (rows == 1 ? columns : plane.row_stride);
    const int64_t batch = a.out_batched ? 2 * plane.batch_stride : rows * row;
    return sm90::MapOutput(a.epilogue.elementwise.out, rows, columns,
                           a.out_batched ? problem_.batch : 1, row, batch, map);
  }

  // What is subtracted and scaled in the main loop. Scales that are constant along K follow it.
  void SetWeights(const Buffers& buffers, Arguments& a) const {
    const Side &lhs = problem_.lhs, &rhs = problem_.rhs;
    Weights& w = a.weights;
    w.dtype = lhs.dtype, w.mn_major = operands_.lhs.mn_major;
    PickCodes(w.mn_major, w.picks);
    w.blocks = ScalesOf(lhs, buffers.lhs_scale, problem_.rows, schedule_.steps, kMixedDepth);
    if (!lhs.scale && !lhs.zero_point) w.blocks.steps_per_scale = Divisor(schedule_.steps);
    if (lhs.tiles.ConstantAlongDepth()) {
      w.blocks.scale = nullptr;
    } else {
      a.lhs_scales.scale = nullptr;
    }
    if (lhs.zero_point) w.zero_point = buffers.lhs_zero_point;
    if (lhs.zero_point || lhs.dtype == DType::kU8) w.terms = RowTerms::kZeros;  // uint8 - 128
    if (w.blocks.scale) w.terms = RowTerms::kScales;
    if (HasFineScales(lhs)) {
      w.terms = RowTerms::kFine;
      w.fine_depth = static_cast<int32_t>(lhs.tiles.tile_depth);
      w.fine_blocks = static_cast<int32_t>((problem_.depth + w.fine_depth - 1) / w.fine_depth);
    }
    w.values = static_cast<const uint16_t*>(buffers.rhs);
    w.values_batch = operands_.rhs.batches > 1 ? rhs.batch_stride : 0,
    w.values_line = rhs.free_stride;
  }

  Arguments ArgumentsFor(const Buffers& buffers) const {
    Arguments a;
    a.schedule = schedule_;
    a.group_sizes = buffers.group_sizes;
    a.lhs_scales = ScalesOf(problem_.lhs, buffers.lhs_scale, problem_.rows, schedule_.steps);
    a.rhs_scales = ScalesOf(problem_.rhs, buffers.rhs_scale, problem_.columns, schedule_.steps);
    if (problem_.grouping == Grouping::kContracted) {  // groups begin at any step
      a.lhs_scales.fours = a.rhs_scales.fours = false;
    }
    a.lhs_zeros = ZerosOf(operands_.lhs, buffers.lhs_zero_point, buffers.lhs_sums, buffers);
    a.rhs_zeros = ZerosOf(operands_.rhs, buffers.rhs_zero_point, buffers.rhs_sums, buffers);
    a.has_zeros = problem_.lhs.zero_point || problem_.rhs.zero_point;
    if (mixed_) SetWeights(buffers, a);
    a.lhs_batched = operands_.lhs.batches > 1, a.rhs_batched = operands_.rhs.batches > 1;
    a.shared_units = buffers.workspace;
    // Tiles of weights are stored transposed.
    const Problem stored = mixed_ ? Swapped(problem_) : problem_;
    a.epilogue = Epilogue{};
    a.epilogue.rows = stored.rows, a.epilogue.columns = stored.columns;
    a.epilogue.depth = stored.depth;
    a.epilogue.elementwise = MakeElementwise(stored, buffers);
    a.out_batched = stored.batch > 1 && stored.out.batch_stride != 0;
    a.stores_directly = StoresDirectly(stored, buffers);
    a.stores_boxes = a.stores_directly && kernel_.has_boxes && SizeOf(stored.out.dtype) == 2;
    a.stores_fours = stored.columns % 4 == 0 && FitsRowBatch(a.epilogue.elementwise);
    return a;
  }

  Status Launch(const Buffers& buffers, cudaStream_t stream) const {
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
    config.gridDim = dim3(static_cast<unsigned>(blocks_));
    config.blockDim = dim3(static_cast<unsigned>(kernel_.threads));
    config.dynamicSmemBytes = static_cast<size_t>(kernel_.shared_bytes);
    config.stream = stream;
    config.attrs = &attribute, config.numAttrs = pair == Pair::kNone ? 0 : 1;
    return CudaError(cudaLaunchKernelEx(&config, kernel_.function, arguments, lhs, rhs, out),
                     "sm90_gemm");
  }

  Problem problem_;       // with 8-bit weights on the left of 16-bit values
  bool mixed_, swapped_;  // whether one side has 16 bits, and the sides were exchanged
  Configuration configuration_;
  Schedule schedule_;
  int32_t multiprocessors_, blocks_ = 1;
  size_t shared_bytes_ = 0;  // of the workspace, where blocks share units
  Operands operands_;
  Kernel kernel_;
};

Status MakePlan(const Problem& problem, const Device& device, size_t workspace,
                std::unique_ptr<Plan>& plan) {
  auto made = std::make_unique<GemmPlan>(problem, device);
  JAXFP8_RETURN_IF_ERROR(made->Prepare(workspace));
  plan = std::move(made);
  return {};
}

}  // namespace

}  // namespace sm90

const Path kSm90Gemm = {"sm90_gemm", sm90::WhyNot, sm90::MakePlan, true, false, true};

}  // namespace jaxfp8::cuda
