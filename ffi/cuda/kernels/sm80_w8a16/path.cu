// The host side of path `sm80_w8a16`: arguments and launches of its kernels (path.h lists them).

#include <algorithm>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/path.h"
#include "cuda/kernels/sm80_w8a16/reduce_partials.cuh"

namespace jaxfp8::cuda {
namespace w8a16 {
namespace {

// Whether a pointer, and every sum of it and multiples of the steps, is a multiple of `to`.
bool Aligned(const void* pointer, int64_t to, std::initializer_list<int64_t> steps) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % to == 0;
  for (int64_t step : steps) aligned = aligned && step % to == 0;
  return aligned;
}

int32_t WeightAccessBytes(const Problem& problem, const Buffers& buffers) {
  const int64_t line = problem.rhs.IsMnMajor() ? problem.rhs.depth : problem.rhs.free;
  for (int access_bytes : {16, 4}) {
    if (Aligned(buffers.rhs, access_bytes, {line, problem.rhs.batch})) return access_bytes;
  }
  return 1;
}

bool ActivationsVectorized(const Problem& problem, const Buffers& buffers) {
  return problem.lhs.depth == 1 &&
         Aligned(buffers.lhs, 16, {2 * problem.lhs.free, 2 * problem.lhs.batch});
}

uint32_t SignFlip(const Problem& problem) {
  return problem.lhs.dtype == DType::kBF16
             ? Decoder<DType::kS8, DType::kBF16>::SignFlip(problem.rhs.dtype)
             : Decoder<DType::kS8, DType::kF16>::SignFlip(problem.rhs.dtype);
}

ScaleForm ScaleFormOf(const Side& side) {
  if (side.scale_rounded) return ScaleForm::kRounded;
  if (side.scale_type == DType::kBF16) return ScaleForm::kBF16;
  return side.scale_type == DType::kF16 ? ScaleForm::kF16 : ScaleForm::kF32;
}

KernelFunction KernelOf(const Problem& problem) {
  const int row_fragments = RowFragmentsFor(problem);
  const bool mn_major = problem.rhs.IsMnMajor();
  switch (problem.rhs.dtype) {
    case DType::kE4M3:
      return E4M3Kernel(problem.lhs.dtype, mn_major, row_fragments);
    case DType::kE5M2:
      return E5M2Kernel(problem.lhs.dtype, mn_major, row_fragments);
    default:
      return S8Kernel(problem.lhs.dtype, mn_major, row_fragments);
  }
}

bool Empty(const Problem& problem) {
  return problem.batch == 0 || problem.rows == 0 || problem.columns == 0;
}

bool IsPlain(const Problem& problem) {
  return problem.activation == Activation::kNone && !problem.amax && !problem.out_scale &&
         !problem.rhs.zero_point && !IsEightBit(problem.out.dtype);
}

EpilogueArguments EpilogueArgumentsFor(const Problem& problem, const Buffers& buffers) {
  EpilogueArguments e;
  e.elementwise = MakeElementwise(problem, buffers);
  e.plain = IsPlain(problem);
  // With K = 0 there are no tiles along K, and so no scales.
  if (problem.lhs.scale && problem.depth > 0) e.row_scales = buffers.lhs_scale;
  e.row_tiles = problem.lhs.tiles;
  e.wide = problem.lhs, e.weight = problem.rhs;
  return e;
}

// The arguments, without the schedule and the partial tiles.
Arguments ArgumentsFor(const Problem& problem, const Buffers& buffers) {
  Arguments a;
  const Side &weights = problem.rhs, &wide = problem.lhs;
  const Tiles& tiles = weights.tiles;
  a.rows = static_cast<int32_t>(problem.rows), a.columns = static_cast<int32_t>(problem.columns);
  a.depth = static_cast<int32_t>(problem.depth);
  a.weight_access_bytes = WeightAccessBytes(problem, buffers);
  a.activations_vectorized = ActivationsVectorized(problem, buffers);
  a.weights = static_cast<const uint8_t*>(buffers.rhs);
  a.activations = static_cast<const uint16_t*>(buffers.lhs);
  a.weight_pitch = weights.IsMnMajor() ? weights.depth : weights.free;
  a.weight_batch = weights.batch;
  a.activation_row = wide.free, a.activation_depth = wide.depth, a.activation_batch = wide.batch;
  if (weights.scale && problem.depth > 0) {
    a.scales = buffers.rhs_scale;
    a.scale_form = ScaleFormOf(weights);
  }
  if (weights.zero_point && problem.depth > 0) a.zero_points = buffers.rhs_zero_point;
  a.scale_batch = tiles.batch_stride, a.scale_depth = tiles.depth_stride;
  a.scale_column = static_cast<int32_t>(tiles.free_stride);
  // A scale's tile may be longer than its axis.
  const int64_t depths = std::max<int64_t>(1, (problem.depth + kTileDepth - 1) / kTileDepth);
  a.depth_tiles_per_scale = static_cast<int32_t>(
      tiles.ConstantAlongDepth() ? depths : std::min(tiles.tile_depth / kTileDepth, depths));
  a.tile_columns = static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_free, 1, problem.columns));
  a.sign_flip = SignFlip(problem);
  a.weight = weights.dtype;
  a.has_zero_points = weights.zero_point || weights.dtype == DType::kU8;  // uint8 is int8 plus 128
  a.epilogue = EpilogueArgumentsFor(problem, buffers);
  return a;
}

cudaLaunchConfig_t LaunchOf(dim3 blocks, int threads, size_t shared, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return config;
}

class W8A16Plan final : public Plan {
 public:
  W8A16Plan(const Problem& problem, const Device& device, bool swapped, size_t workspace)
      : problem_(problem), device_(device), swapped_(swapped), workspace_(workspace) {}

  // Fits the kernel to the device; returns what went wrong, or "".
  std::string Prepare() {
    kernel_ = KernelOf(problem_);
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, kernel_);
    if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
    // What the code that runs on the device was compiled for: the driver may have translated it
    // from PTX of an older architecture.
    clusters_ = attributes.ptxVersion >= 90;
    status = cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, Shared());
    if (status != cudaSuccess) return CudaError(status, "cudaFuncSetAttribute");
    int blocks = 0;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_, kThreads, Shared());
    if (status != cudaSuccess) {
      return CudaError(status, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    }
    if (blocks == 0) return "`sm80_w8a16` does not fit on a multiprocessor of the device";
    Capacity capacity = CapacityOf(problem_, device_.multiprocessors, blocks, workspace_);
    if (clusters_) {
      capacity.in_waves = true;
      const std::string wrong = CountClusters(capacity);
      if (!wrong.empty()) return wrong;
    }
    schedule_ = MakeSchedule(problem_, capacity);
    return "";
  }

  std::string Run(const Buffers& given, cudaStream_t stream) const override {
    const Buffers buffers = swapped_ ? Swapped(given) : given;
    std::string wrong = ClearAmax(problem_, buffers, stream);
    if (!wrong.empty() || Empty(problem_)) return wrong;
    if (buffers.workspace_bytes < workspace_) {
      return "`sm80_w8a16` was planned for a workspace of " + std::to_string(workspace_) +
             " bytes and got " + std::to_string(buffers.workspace_bytes);
    }
    Arguments arguments = ArgumentsFor(problem_, buffers);
    arguments.schedule = schedule_;
    arguments.partials = static_cast<float*>(buffers.workspace);
    wrong = LaunchMainloop(arguments, stream);
    if (wrong.empty() && schedule_.split > 1 && !clusters_) wrong = LaunchReduce(arguments, stream);
    return wrong;
  }

 private:
  // How many clusters of each size run at a time. Fewer than blocks divided by their size, since a
  // cluster has to fit a group of multiprocessors of which devices have more and less whole ones.
  std::string CountClusters(Capacity& capacity) const {
    for (int split = 2; split <= kMaxSplit; ++split) {
      cudaLaunchAttribute attribute = {};
      const cudaLaunchConfig_t config = LaunchOfClusters(split, split, nullptr, attribute);
      int clusters = 0;
      const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel_, &config);
      if (status != cudaSuccess) return CudaError(status, "cudaOccupancyMaxActiveClusters");
      capacity.tiles[split] = clusters;
    }
    return "";
  }

  int Shared() const { return SharedBytes(RowFragmentsFor(problem_)); }

  // attribute: of the launch, which has to live as long
  cudaLaunchConfig_t LaunchOfClusters(int64_t tiles, int split, cudaStream_t stream,
                                      cudaLaunchAttribute& attribute) const {
    const dim3 blocks(static_cast<unsigned>(tiles), static_cast<unsigned>(split));
    cudaLaunchConfig_t config = LaunchOf(blocks, kThreads, Shared(), stream);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1, attribute.val.clusterDim.y = blocks.y;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = clusters_ && split > 1 ? 1 : 0;
    return config;
  }

  std::string LaunchMainloop(const Arguments& arguments, cudaStream_t stream) const {
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config =
        LaunchOfClusters(schedule_.output_tiles, schedule_.split, stream, attribute);
    return CudaError(cudaLaunchKernelEx(&config, kernel_, arguments), "sm80_w8a16");
  }

  std::string LaunchReduce(const Arguments& arguments, cudaStream_t stream) const {
    const int tile_rows = 8 * RowFragmentsFor(problem_);
    const int quads = std::min(arguments.rows, tile_rows) * kTileColumns / 4;
    const auto blocks = static_cast<unsigned>((quads + kReduceThreads - 1) / kReduceThreads);
    const cudaLaunchConfig_t config = LaunchOf(
        dim3(static_cast<unsigned>(schedule_.output_tiles), blocks), kReduceThreads, 0, stream);
    return CudaError(cudaLaunchKernelEx(&config, ReducePartials, arguments, tile_rows),
                     "sm80_w8a16 reduce");
  }

  Problem problem_;  // rhs is the 8-bit side
  Device device_;
  bool swapped_;
  size_t workspace_;
  KernelFunction kernel_ = nullptr;
  Schedule schedule_;
  bool clusters_ = false;  // blocks that share an output tile are a cluster
};

std::unique_ptr<Plan> Make(const Problem& problem, const Device& device, size_t workspace,
                           std::string& wrong) {
  const Problem oriented = WithWeightsOnRight(problem);
  auto plan = std::make_unique<W8A16Plan>(oriented, device, HasWeightsOnLeft(problem), workspace);
  if (!Empty(oriented)) wrong = plan->Prepare();
  if (!wrong.empty()) return nullptr;
  return plan;
}

}  // namespace
}  // namespace w8a16

const Path kSm80W8A16 = {"sm80_w8a16", w8a16::WhyNotEither, w8a16::Make, true};

}  // namespace jaxfp8::cuda
