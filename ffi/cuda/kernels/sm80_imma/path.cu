// Path "sm80_imma": up to 32 rows of int8 or 16 bits times FP8 weights, computed in int8.
//
// It rounds operands a second time, as `compute="int8"` does, so it computes another number than
// other paths do. Only a call whose kernel is "int8" (route.h) or this one gets it. A call has
// these launches:
//   RoundRows    the activations as int8 codes in aligned lines, if they are not activations.cuh
//   Sm80Imma     the product, from reading the weights to the whole epilogue         kernel.cuh

#include <algorithm>

#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/sm80_imma/activations.cuh"
#include "cuda/kernels/sm80_imma/arguments.h"
#include "cuda/kernels/sm80_imma/schedule.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace imma {
namespace {

KernelFunction KernelOf(const Problem& problem, int row_tiles) {
  const bool mn_major = problem.rhs.IsMnMajor();
  return problem.rhs.dtype == DType::kE4M3 ? KernelFor<DType::kE4M3>(mn_major, row_tiles)
                                           : KernelFor<DType::kE5M2>(mn_major, row_tiles);
}

using RowFunction = void (*)(RowArguments);

RowFunction RowKernelOf(DType type) {
  return Visit<DType::kS8, DType::kBF16, DType::kF16>(
      type, RowFunction{nullptr}, [&]<DType kType>() { return RowFunction{RoundRows<kType>}; });
}

bool Empty(const Problem& problem) { return problem.batch * problem.rows * problem.columns == 0; }

// From line to line of a side, in bytes.
int64_t PitchBytes(const Side& side) {
  return (side.IsMnMajor() ? side.depth_stride : side.free_stride) * SizeOf(side.dtype);
}

int AlignmentOfSide(const Side& side, const void* values) {
  return AlignmentOf(values, {PitchBytes(side), side.batch_stride * SizeOf(side.dtype)});
}

// A launch with up to two attributes.
struct Launch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};

  Launch(dim3 blocks, int shared, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stream;
    config.attrs = attributes;
  }
  Launch(const Launch&) = delete;
  cudaLaunchAttribute& Next(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& next = attributes[config.numAttrs++];
    next.id = id;
    return next;
  }
};

class ImmaPlan final : public Plan {
 public:
  ImmaPlan(const Problem& problem, const Device& device, bool swapped, size_t workspace)
      : problem_(problem),
        swapped_(swapped),
        workspace_(workspace),
        schedule_(MakeSchedule(problem, device)),
        most_shared_(static_cast<int>(device.shared_bytes)),
        kernel_(KernelOf(problem, schedule_.row_tiles)) {}

  // Fits the kernel to the device.
  Status Prepare() {
    const size_t needed = Empty(problem_) ? 0 : ScratchOf(problem_).bytes;
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(workspace_, needed));
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, kernel_);
    if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
    // The driver may have translated the kernel from PTX of an older architecture.
    hopper_ = attributes.ptxVersion >= 90;
    if (!hopper_ && schedule_.split > 1) {
      return "`sm80_imma` splits this product over a cluster, but was not compiled for this GPU; "
             "build the library for its compute capability";
    }
    // Plans of other depths share the kernel.
    status =
        cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_);
    return CudaError(status, "cudaFuncSetAttribute");
  }

  Status Run(const Buffers& given, cudaStream_t stream) const override {
    const Buffers buffers = swapped_ ? Swapped(given) : given;
    JAXFP8_RETURN_IF_ERROR(ClearAmax(problem_, buffers, stream));
    if (Empty(problem_)) return {};
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, workspace_));
    Arguments a = ArgumentsFor(buffers);
    const Side& side = problem_.lhs;
    // The kernel reads codes in runs of 16.
    const bool in_place = side.dtype == DType::kS8 && !side.IsMnMajor() &&
                          problem_.depth % 16 == 0 && AlignmentOfSide(side, buffers.lhs) == 16;
    if (!in_place) JAXFP8_RETURN_IF_ERROR(LaunchRows(buffers, a, stream));
    return LaunchProduct(a, !in_place, stream);
  }

 private:
  int Shared() const { return SharedBytes(schedule_.row_tiles, schedule_.depth); }

  // As if the activations were int8 in aligned lines.
  Arguments ArgumentsFor(const Buffers& buffers) const {
    const Side &lhs = problem_.lhs, &rhs = problem_.rhs;
    Arguments a;
    a.rows = static_cast<int32_t>(problem_.rows);
    a.columns = static_cast<int32_t>(problem_.columns);
    a.depth = static_cast<int32_t>(problem_.depth);
    a.split_depth = schedule_.depth;
    a.weights = static_cast<const uint8_t*>(buffers.rhs);
    a.weight_batch = rhs.batch_stride, a.weight_pitch = PitchBytes(rhs);
    a.weights_aligned = AlignmentOfSide(rhs, buffers.rhs) == 16;
    a.codes = static_cast<const int8_t*>(buffers.lhs);
    a.codes_batch = lhs.batch_stride, a.codes_pitch = lhs.free_stride;
    if (lhs.scale) a.row_scale = buffers.lhs_scale, a.row_tiles = lhs.tiles;
    if (rhs.scale) a.column_scale = buffers.rhs_scale, a.column_tiles = rhs.tiles;
    a.elementwise = MakeElementwise(problem_, buffers);
    return a;
  }

  // Makes int8 codes in the workspace, and has `a` read them.
  Status LaunchRows(const Buffers& buffers, Arguments& a, cudaStream_t stream) const {
    const Side& side = problem_.lhs;
    const CodesScratch scratch = ScratchOf(problem_);
    auto* workspace = static_cast<uint8_t*>(buffers.workspace);
    RowArguments r;
    r.values = buffers.lhs;
    r.batch_stride = side.batch_stride, r.row_stride = side.free_stride;
    r.depth_stride = side.depth_stride;
    r.rows = a.rows, r.depth = a.depth;
    r.alignment = AlignmentOfSide(side, buffers.lhs);
    r.given = a.row_scale, r.tiles = side.tiles;
    r.codes = reinterpret_cast<int8_t*>(workspace), r.pitch = scratch.pitch;
    r.scale = reinterpret_cast<float*>(workspace + scratch.scales);
    const bool shared = side.batch_stride == 0;  // by the batch
    a.codes = r.codes, a.codes_pitch = r.pitch;
    a.codes_batch = shared ? 0 : r.rows * r.pitch;
    if (side.dtype != DType::kS8) {
      a.row_scale = r.scale;
      a.row_tiles = {1, std::max<int64_t>(problem_.depth, 1), shared ? 0 : problem_.rows, 1, 0};
    }
    const auto batches = static_cast<unsigned>(shared ? 1 : problem_.batch);
    const Launch launch(dim3(static_cast<unsigned>(r.rows), batches), 0, stream);
    const cudaError_t status = cudaLaunchKernelEx(&launch.config, RowKernelOf(side.dtype), r);
    return CudaError(status, "sm80_imma rows");
  }

  // after_rows: whether the stream's last kernel is `RoundRows`. The weights are read meanwhile.
  Status LaunchProduct(const Arguments& a, bool after_rows, cudaStream_t stream) const {
    const dim3 blocks(static_cast<unsigned>(schedule_.column_tiles),
                      static_cast<unsigned>(schedule_.split),
                      static_cast<unsigned>(problem_.batch));
    Launch launch(blocks, Shared(), stream);
    if (schedule_.split > 1) {
      launch.Next(cudaLaunchAttributeClusterDimension).val.clusterDim = {1, blocks.y, 1};
    }
    if (after_rows && hopper_) {
      launch.Next(cudaLaunchAttributeProgrammaticStreamSerialization)
          .val.programmaticStreamSerializationAllowed = 1;
    }
    return CudaError(cudaLaunchKernelEx(&launch.config, kernel_, a), "sm80_imma");
  }

  Problem problem_;  // the weights are on the right
  bool swapped_;
  size_t workspace_;
  SplitGrid schedule_;
  int most_shared_;  // of a CTA, in bytes
  KernelFunction kernel_;
  bool hopper_ = false;  // clusters, and kernels may start before their predecessor ends
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
