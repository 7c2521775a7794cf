#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/sm80_imma/line_scales.cuh"
#include "cuda/kernels/sm80_imma/path.h"
#include "cuda/kernels/sm80_imma/schedule.h"

namespace jaxfp8::cuda {
namespace imma {

template <DType kType, bool kMnMajor>
__global__ void __launch_bounds__(kThreads)
    FindScales(const __grid_constant__ LineScaleArguments a) {
  FindLineScales<kType, kMnMajor>(a);
}

namespace {

KernelFunction KernelOf(const Problem& problem) {
  const bool mn_major = problem.rhs.IsMnMajor();
  const int row_fragments = RowFragmentsFor(problem);
  return problem.rhs.dtype == DType::kE4M3 ? E4M3Kernel(problem.lhs.dtype, mn_major, row_fragments)
                                           : E5M2Kernel(problem.lhs.dtype, mn_major, row_fragments);
}

LineScaleFunction ScalesOf(const Side& side) {
  return Visit<DType::kE4M3, DType::kE5M2, DType::kBF16, DType::kF16>(
      side.dtype, LineScaleFunction{nullptr}, [&]<DType kType>() {
        return side.IsMnMajor() ? FindScales<kType, true> : FindScales<kType, false>;
      });
}

Operand OperandOf(const Side& side, const void* values, int64_t lines, const float* step) {
  Operand o;
  o.values = values;
  o.batch = side.batch_stride, o.line = side.free_stride, o.depth = side.depth_stride;
  const int64_t size = SizeOf(side.dtype);
  const int64_t pitch = side.IsMnMajor() ? side.depth_stride : side.free_stride;
  o.aligned = AlignmentOf(values, {pitch * size, side.batch_stride * size}) == 16;
  if (side.dtype == DType::kS8) return o;
  o.step = step, o.step_batch = side.batch_stride == 0 ? 0 : lines;
  return o;
}

// A side as the epilogue sees it: int8 codes with a scale for each line.
void MakeInt8(int64_t depth, int64_t lines, const float* line_scale, Side& side,
              const float*& scale) {
  if (side.dtype == DType::kS8) return;
  side.dtype = DType::kS8, side.scale = true;
  side.tiles = {1, std::max<int64_t>(depth, 1), side.batch_stride == 0 ? 0 : lines, 1, 0};
  scale = line_scale;
}

class ImmaPlan final : public Plan {
 public:
  ImmaPlan(const Problem& problem, const Device& device, bool swapped, size_t workspace)
      : problem_(problem),
        multiprocessors_(device.multiprocessors),
        swapped_(swapped),
        workspace_(workspace),
        kernel_(KernelOf(problem)),
        shared_bytes_(SharedBytes(SizeOf(problem.lhs.dtype), RowFragmentsFor(problem))) {}

  // Fits the kernel to the device.
  Status Prepare() {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_);
    if (status != cudaSuccess) return CudaError(status, "cudaFuncSetAttribute");
    return WhyNotWorkspace(problem_, workspace_);
  }

  Status Run(const Buffers& given, cudaStream_t stream) const override {
    const Buffers buffers = swapped_ ? Swapped(given) : given;
    JAXFP8_RETURN_IF_ERROR(ClearAmax(problem_, buffers, stream));
    if (problem_.batch * problem_.rows * problem_.columns == 0) return {};
    if (buffers.workspace_bytes < workspace_) {
      return "`sm80_imma` was planned for a workspace of " + std::to_string(workspace_) +
             " bytes and got " + std::to_string(buffers.workspace_bytes);
    }
    auto* workspace = static_cast<uint8_t*>(buffers.workspace);
    const Scratch scratch = ScratchOf(problem_);
    const auto floats = [&](size_t at) { return reinterpret_cast<float*>(workspace + at); };
    Arguments a;
    a.rows = static_cast<int32_t>(problem_.rows),
    a.columns = static_cast<int32_t>(problem_.columns);
    a.depth = static_cast<int32_t>(problem_.depth);
    a.activations = OperandOf(problem_.lhs, buffers.lhs, a.rows, floats(scratch.lhs_steps));
    if (problem_.lhs.IsMnMajor()) a.activations.aligned = false;  // a chunk is along K
    a.weights = OperandOf(problem_.rhs, buffers.rhs, a.columns, floats(scratch.rhs_steps));
    a.sums = reinterpret_cast<int32_t*>(workspace + scratch.sums);
    a.pitch = static_cast<int32_t>(PitchOf(problem_));
    const auto depth = static_cast<int32_t>(problem_.depth);
    JAXFP8_RETURN_IF_ERROR(
        LaunchScales(problem_.lhs,
                     {a.activations, a.rows, depth, buffers.lhs_scale, problem_.lhs.tiles,
                      floats(scratch.lhs_steps), floats(scratch.lhs_scales)},
                     stream));
    JAXFP8_RETURN_IF_ERROR(
        LaunchScales(problem_.rhs,
                     {a.weights, a.columns, depth, buffers.rhs_scale, problem_.rhs.tiles,
                      floats(scratch.rhs_steps), floats(scratch.rhs_scales)},
                     stream));
    const InInt8 in_int8 =
        WithCodes(buffers, floats(scratch.lhs_scales), floats(scratch.rhs_scales));
    return ForEachPiece(problem_, workspace_, [&](const Piece& piece) -> Status {
      JAXFP8_RETURN_IF_ERROR(LaunchSums(piece, a, stream));
      return LaunchRest(piece, a, in_int8, stream);
    });
  }

 private:
  // The problem as the epilogue sees it, with int8 codes on both sides.
  struct InInt8 {
    Problem problem;
    Buffers buffers;
  };

  InInt8 WithCodes(const Buffers& buffers, const float* lhs_scale, const float* rhs_scale) const {
    InInt8 made{problem_, buffers};
    Problem& p = made.problem;
    MakeInt8(p.depth, p.rows, lhs_scale, p.lhs, made.buffers.lhs_scale);
    MakeInt8(p.depth, p.columns, rhs_scale, p.rhs, made.buffers.rhs_scale);
    return made;
  }

  Status LaunchScales(const Side& side, LineScaleArguments a, cudaStream_t stream) const {
    if (side.dtype == DType::kS8) return {};
    if (!side.scale) a.given = nullptr;
    const auto blocks = static_cast<unsigned>(
        side.IsMnMajor() ? (a.lines + kLinesOfBlock - 1) / kLinesOfBlock : a.lines);
    const auto batches = static_cast<unsigned>(side.batch_stride == 0 ? 1 : problem_.batch);
    ScalesOf(side)<<<dim3(blocks, 1, batches), kThreads, kLineScaleSharedBytes, stream>>>(a);
    return CudaError(cudaGetLastError(), "sm80_imma scales");
  }

  Status LaunchSums(const Piece& piece, Arguments a, cudaStream_t stream) const {
    const Schedule s = MakeSchedule(problem_, piece, multiprocessors_);
    a.first_batch = static_cast<int32_t>(piece.batch);
    a.first_row = static_cast<int32_t>(piece.row);
    a.rows = static_cast<int32_t>(piece.row + piece.rows);
    a.sums_batch = piece.rows * a.pitch;
    a.row_tiles = s.row_tiles, a.depth_tiles = s.depth_tiles;
    a.depth_tiles_per_split = s.depth_tiles_per_split;
    a.adds = s.splits > 1;
    if (a.adds) {
      const size_t bytes = 4 * static_cast<size_t>(piece.batches * a.sums_batch);
      const cudaError_t status = cudaMemsetAsync(a.sums, 0, bytes, stream);
      if (status != cudaSuccess) return CudaError(status, "clearing the sums of sm80_imma");
    }
    const dim3 grid(static_cast<unsigned>(s.row_tiles) * static_cast<unsigned>(s.column_tiles),
                    static_cast<unsigned>(s.splits), static_cast<unsigned>(piece.batches));
    kernel_<<<grid, kThreads, static_cast<size_t>(shared_bytes_), stream>>>(a);
    return CudaError(cudaGetLastError(), "sm80_imma");
  }

  Status LaunchRest(const Piece& piece, const Arguments& a, const InInt8& in_int8,
                    cudaStream_t stream) const {
    const Problem& problem = in_int8.problem;
    EpilogueRequest request;
    request.slab = {DType::kS32, piece.batch,     piece.batches,        piece.row, piece.rows,
                    0,           problem.columns, piece.rows * a.pitch, a.pitch};
    request.lhs.scale = problem.lhs.scale, request.rhs.scale = problem.rhs.scale;
    return LaunchEpilogue(problem, request, a.sums, in_int8.buffers, stream);
  }

  Problem problem_;  // the weights are on the right
  int multiprocessors_;
  bool swapped_;
  size_t workspace_;
  KernelFunction kernel_;
  int shared_bytes_;
};

Status Make(const Problem& problem, const Device& device, size_t workspace,
            std::unique_ptr<Plan>& plan) {
  auto made = std::make_unique<ImmaPlan>(WithWeightsOnRight(problem), device,
                                         HasWeightsOnLeft(problem), workspace);
  JAXFP8_RETURN_IF_ERROR(made->Prepare());
  plan = std::move(made);
  return {};
}

}  // namespace
}  // namespace imma

const Path kSm80Imma = {"sm80_imma", imma::WhyNot, imma::Make};

}  // namespace jaxfp8::cuda
