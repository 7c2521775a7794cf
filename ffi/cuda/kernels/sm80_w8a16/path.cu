// The host side of path `sm80_w8a16`: arguments and launches of its kernels (path.h lists them).

#include <algorithm>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/pack_activations.cuh"
#include "cuda/kernels/sm80_w8a16/path.h"
#include "cuda/kernels/sm80_w8a16/split_k.cuh"

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
  if (weights.scale) a.scales = buffers.rhs_scale;
  if (weights.zero_point) a.zero_points = buffers.rhs_zero_point;
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
  return a;
}

ReduceArguments ReduceArgumentsFor(const Problem& problem, const Buffers& buffers) {
  ReduceArguments a;
  const int row_fragments = RowFragmentsFor(problem);
  a.elementwise = MakeElementwise(problem, buffers);
  a.rows = static_cast<int32_t>(problem.rows), a.columns = static_cast<int32_t>(problem.columns);
  a.depth = static_cast<int32_t>(problem.depth);
  a.tile_rows = 8 * row_fragments;
  a.stored_rows = std::min(a.rows, a.tile_rows);
  // With K = 0 there are no tiles along K, and so no scales.
  if (problem.lhs.scale && problem.depth > 0) a.row_scales = buffers.lhs_scale;
  a.row_tiles = problem.lhs.tiles;
  if (problem.rhs.zero_point && problem.depth > 0) a.zero_points = buffers.rhs_zero_point;
  if (problem.rhs.scale) a.scales = buffers.rhs_scale;
  a.activations = buffers.lhs;
  a.wide = problem.lhs, a.weight = problem.rhs;
  return a;
}

PackActivationsArguments PackActivationsArgumentsFor(const Problem& problem,
                                                     const Buffers& buffers) {
  PackActivationsArguments a;
  const Side& wide = problem.lhs;
  const int row_fragments = RowFragmentsFor(problem);
  a.from = static_cast<const uint16_t*>(buffers.lhs);
  a.to = static_cast<uint4*>(buffers.workspace);
  a.row_stride = wide.free, a.depth_stride = wide.depth, a.batch_stride = wide.batch;
  a.chunks = static_cast<int64_t>(PackedBytesOf(problem) / sizeof(uint4));
  a.rows = static_cast<int32_t>(problem.rows), a.depth = static_cast<int32_t>(problem.depth);
  a.tile_rows = 8 * row_fragments;
  a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
  a.depth_tiles = static_cast<int32_t>((problem.depth + kTileDepth - 1) / kTileDepth);
  return a;
}

// Whether the code that runs on the device uses wgmma, and so packed activations: it was compiled
// for sm_90a, not translated by the driver from PTX of an older architecture.
std::string UsesPackedActivations(const Device& device, KernelFunction kernel, int row_fragments,
                                  bool& packs) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
  packs = PacksActivations(row_fragments) && device.compute_capability == 90 &&
          attributes.ptxVersion == 90;
  return "";
}

cudaLaunchConfig_t LaunchOf(int64_t blocks, int threads, size_t shared, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return config;
}

// How many warps share the partial tiles of an output tile, so that each loads all of its at once.
int SplitWarpsFor(const Schedule& schedule) {
  const int64_t most = (schedule.depth_tiles + 2 * schedule.iterations_per_block - 2) /
                       std::max(schedule.iterations_per_block, 1);
  int split_warps = 1;
  while (split_warps < kReduceWarps && most > kPartialsInFlight * split_warps) split_warps *= 2;
  return split_warps;
}

bool IsPlain(const Problem& problem) {
  return problem.activation == Activation::kNone && !problem.amax && !problem.out_scale &&
         !problem.rhs.zero_point;
}

class W8A16Plan final : public Plan {
 public:
  W8A16Plan(const Problem& problem, const Device& device, bool swapped, size_t workspace)
      : problem_(problem), device_(device), swapped_(swapped), workspace_(workspace) {}

  // Fits the kernel to the device; returns what went wrong, or "".
  std::string Prepare() {
    const int row_fragments = RowFragmentsFor(problem_), shared = SharedBytes(row_fragments);
    kernel_ = KernelOf(problem_);
    bool packs = false;
    std::string wrong = UsesPackedActivations(device_, kernel_, row_fragments, packs);
    if (!wrong.empty()) return wrong;
    packed_ = packs ? PackedBytesOf(problem_) : 0;
    cudaError_t status =
        cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return CudaError(status, "cudaFuncSetAttribute");
    int blocks = 0;
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_, kThreads, shared);
    if (status != cudaSuccess) {
      return CudaError(status, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    }
    if (blocks == 0) return "`sm80_w8a16` does not fit on a multiprocessor of the device";
    blocks_at_once_ = static_cast<int64_t>(blocks) * device_.multiprocessors;
    return WhyNotWorkspace(problem_, packed_, workspace_);
  }

  std::string Run(const Buffers& given, cudaStream_t stream) const override {
    const Buffers buffers = swapped_ ? Swapped(given) : given;
    std::string wrong = ClearAmax(problem_, buffers, stream);
    if (!wrong.empty() || Empty(problem_)) return wrong;
    if (buffers.workspace_bytes < workspace_) {
      return "`sm80_w8a16` was planned for a workspace of " + std::to_string(workspace_) +
             " bytes and got " + std::to_string(buffers.workspace_bytes);
    }
    if (packed_ > 0) wrong = LaunchPackActivations(buffers, stream);
    const int64_t output_tiles = OutputTiles(problem_);
    for (int64_t first = 0; first < output_tiles && wrong.empty();) {
      const Schedule schedule =
          MakeSchedule(problem_, blocks_at_once_, workspace_ - packed_, first);
      if (problem_.depth > 0) wrong = LaunchMainloop(schedule, buffers, stream);
      if (wrong.empty()) wrong = LaunchReduce(schedule, buffers, stream);
      first += schedule.output_tiles;
    }
    return wrong;
  }

 private:
  float* PartialsOf(const Buffers& buffers) const {
    return reinterpret_cast<float*>(static_cast<char*>(buffers.workspace) + packed_);
  }

  // overlaps: the kernel may start before the launch before it has ended (programmatic dependent
  // launch), and waits for it with `WaitForPrerequisiteGrids`.
  template <typename Kernel, typename Given>
  std::string Launch(const char* what, cudaLaunchConfig_t config, bool overlaps, Kernel kernel,
                     const Given& given) const {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlaps && device_.compute_capability >= 90 ? 1 : 0;
    return CudaError(cudaLaunchKernelEx(&config, kernel, given), what);
  }

  std::string LaunchPackActivations(const Buffers& buffers, cudaStream_t stream) const {
    const PackActivationsArguments arguments = PackActivationsArgumentsFor(problem_, buffers);
    const int64_t blocks =
        (arguments.chunks + kPackActivationsThreads - 1) / kPackActivationsThreads;
    return Launch("sm80_w8a16 pack", LaunchOf(blocks, kPackActivationsThreads, 0, stream), false,
                  PackActivations, arguments);
  }

  std::string LaunchMainloop(const Schedule& schedule, const Buffers& buffers,
                             cudaStream_t stream) const {
    Arguments arguments = ArgumentsFor(problem_, buffers);
    arguments.schedule = schedule;
    arguments.partials = PartialsOf(buffers);
    if (packed_ > 0) {
      arguments.activations = static_cast<const uint16_t*>(buffers.workspace);
      const int64_t tiles = int64_t{schedule.row_tiles} * schedule.depth_tiles;
      const int64_t batch = tiles * PackedBytes(RowFragmentsFor(problem_)) / 2;
      arguments.activation_batch = problem_.lhs.batch == 0 ? 0 : batch;
    }
    const auto shared = static_cast<size_t>(SharedBytes(RowFragmentsFor(problem_)));
    const bool overlaps = packed_ > 0 && schedule.first == 0;
    return Launch("sm80_w8a16", LaunchOf(schedule.blocks, kThreads, shared, stream), overlaps,
                  kernel_, arguments);
  }

  std::string LaunchReduce(const Schedule& schedule, const Buffers& buffers,
                           cudaStream_t stream) const {
    ReduceArguments arguments = ReduceArgumentsFor(problem_, buffers);
    arguments.schedule = schedule;
    arguments.partials = PartialsOf(buffers);
    arguments.split_warps = SplitWarpsFor(schedule);
    const int64_t blocks_at_once = int64_t{kReduceBlocksPerSm} * device_.multiprocessors;
    const int at_once = kReduceWarps / arguments.split_warps;
    const int most = (arguments.stored_rows + at_once - 1) / at_once;
    arguments.blocks_per_tile =
        static_cast<int32_t>(std::clamp<int64_t>(blocks_at_once / schedule.output_tiles, 1, most));
    const int64_t blocks = int64_t{schedule.output_tiles} * arguments.blocks_per_tile;
    if (blocks >> 31) return "`sm80_w8a16` has more outputs than a launch has blocks";
    return Launch("sm80_w8a16 finish", LaunchOf(blocks, kReduceThreads, 0, stream),
                  problem_.depth > 0,
                  IsPlain(problem_) ? ReducePartials<true> : ReducePartials<false>, arguments);
  }

  Problem problem_;  // rhs is the 8-bit side
  Device device_;
  bool swapped_;
  size_t workspace_;
  KernelFunction kernel_ = nullptr;
  size_t packed_ = 0;           // bytes of packed activations, which precede the partial tiles
  int64_t blocks_at_once_ = 1;  // that the device runs
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

const Path kSm80W8A16 = {"sm80_w8a16", w8a16::WhyNotEither, w8a16::Make};

}  // namespace jaxfp8::cuda
