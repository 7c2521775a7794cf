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

// Whether a pointer and all offsets that are sums of multiples of the steps are multiples of `to`.
bool Aligned(const void* pointer, int64_t to, std::initializer_list<int64_t> steps) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % to == 0;
  for (int64_t step : steps) aligned = aligned && step % to == 0;
  return aligned;
}

int32_t WeightWidth(const Problem& problem, const Buffers& buffers) {
  const int64_t line = problem.rhs.DepthMajor() ? problem.rhs.depth : problem.rhs.free;
  for (int width : {16, 4}) {
    if (Aligned(buffers.rhs, width, {line, problem.rhs.batch})) return width;
  }
  return 1;
}

bool ActivationVectors(const Problem& problem, const Buffers& buffers) {
  return problem.lhs.depth == 1 &&
         Aligned(buffers.lhs, 16, {2 * problem.lhs.free, 2 * problem.lhs.batch});
}

uint32_t FlipOf(const Problem& problem) {
  return problem.lhs.dtype == DType::kBF16
             ? Decoder<DType::kS8, DType::kBF16>::FlipOf(problem.rhs.dtype)
             : Decoder<DType::kS8, DType::kF16>::FlipOf(problem.rhs.dtype);
}

KernelFunction KernelOf(const Problem& problem) {
  const int eights = EightsFor(problem);
  const bool depth_major = problem.rhs.DepthMajor();
  switch (problem.rhs.dtype) {
    case DType::kE4M3:
      return E4M3Kernel(problem.lhs.dtype, depth_major, eights);
    case DType::kE5M2:
      return E5M2Kernel(problem.lhs.dtype, depth_major, eights);
    default:
      return S8Kernel(problem.lhs.dtype, depth_major, eights);
  }
}

bool Empty(const Problem& problem) {
  return problem.batch == 0 || problem.rows == 0 || problem.columns == 0;
}

// All but the schedule and the slots.
Arguments ArgumentsFor(const Problem& problem, const Buffers& buffers) {
  Arguments a;
  const Side &weights = problem.rhs, &wide = problem.lhs;
  const Tiles& tiles = weights.tiles;
  a.rows = static_cast<int32_t>(problem.rows), a.columns = static_cast<int32_t>(problem.columns);
  a.depth = static_cast<int32_t>(problem.depth);
  a.weight_width = WeightWidth(problem, buffers);
  a.activation_vectors = ActivationVectors(problem, buffers);
  a.weights = static_cast<const uint8_t*>(buffers.rhs);
  a.activations = static_cast<const uint16_t*>(buffers.lhs);
  a.weight_line = weights.DepthMajor() ? weights.depth : weights.free;
  a.weight_batch = weights.batch;
  a.activation_row = wide.free, a.activation_depth = wide.depth, a.activation_batch = wide.batch;
  if (weights.scale) a.scales = buffers.rhs_scale;
  if (weights.zero_point) a.zero_points = buffers.rhs_zero_point;
  a.scale_batch = tiles.batch_stride, a.scale_depth = tiles.depth_stride;
  a.scale_column = static_cast<int32_t>(tiles.free_stride);
  // Tiles longer than an axis are as long as it.
  const int64_t depths = std::max<int64_t>(1, (problem.depth + kTileDepth - 1) / kTileDepth);
  a.stretch = static_cast<int32_t>(
      tiles.ConstantAlongDepth() ? depths : std::min(tiles.tile_depth / kTileDepth, depths));
  a.tile_columns = static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_free, 1, problem.columns));
  a.flip = FlipOf(problem);
  a.weight = weights.dtype;
  a.subtracts = weights.zero_point || weights.dtype == DType::kU8;  // uint8 is int8 plus 128
  return a;
}

FinishArguments FinishArgumentsFor(const Problem& problem, const Buffers& buffers) {
  FinishArguments a;
  const int eights = EightsFor(problem);
  a.finish = MakeFinish(problem, buffers);
  a.rows = static_cast<int32_t>(problem.rows), a.columns = static_cast<int32_t>(problem.columns);
  a.depth = static_cast<int32_t>(problem.depth);
  a.tile_rows = 8 * eights;
  a.lines = std::min(a.rows, a.tile_rows);
  // Without any depth there are no tiles along it, and so no scales.
  if (problem.lhs.scale && problem.depth > 0) a.row_scales = buffers.lhs_scale;
  a.row_tiles = problem.lhs.tiles;
  if (problem.rhs.zero_point && problem.depth > 0) a.zero_points = buffers.rhs_zero_point;
  if (problem.rhs.scale) a.scales = buffers.rhs_scale;
  a.activations = buffers.lhs;
  a.wide = problem.lhs, a.weight = problem.rhs;
  return a;
}

PackArguments PackArgumentsFor(const Problem& problem, const Buffers& buffers) {
  PackArguments a;
  const Side& wide = problem.lhs;
  const int eights = EightsFor(problem);
  a.from = static_cast<const uint16_t*>(buffers.lhs);
  a.to = static_cast<uint4*>(buffers.workspace);
  a.row_stride = wide.free, a.depth_stride = wide.depth, a.batch_stride = wide.batch;
  a.lines = static_cast<int64_t>(PackedBytesOf(problem) / sizeof(uint4));
  a.rows = static_cast<int32_t>(problem.rows), a.depth = static_cast<int32_t>(problem.depth);
  a.tile_rows = 8 * eights;
  a.row_tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
  a.depth_tiles = static_cast<int32_t>((problem.depth + kTileDepth - 1) / kTileDepth);
  return a;
}

// Whether the instance that runs on the device is the one that wants its activations packed: the
// code made for sm_90a, and not what the driver makes of that for an older device.
std::string WantsPacked(const Device& device, KernelFunction kernel, int eights, bool& wants) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
  wants = PacksFor(eights) && device.compute_capability == 90 && attributes.ptxVersion == 90;
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

// How many warps share the adding of a tile's slots, so that each loads all of its at once.
int WaysFor(const Schedule& schedule) {
  const int64_t most = (schedule.depth_tiles + 2 * schedule.each - 2) / std::max(schedule.each, 1);
  int ways = 1;
  while (ways < kFinishWarps && most > kSlotsAtOnce * ways) ways *= 2;
  return ways;
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
    const int eights = EightsFor(problem_), shared = SharedBytes(eights);
    kernel_ = KernelOf(problem_);
    bool packs = false;
    std::string wrong = WantsPacked(device_, kernel_, eights, packs);
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
    resident_ = static_cast<int64_t>(blocks) * device_.multiprocessors;
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
    if (packed_ > 0) wrong = LaunchPack(buffers, stream);
    const int64_t outputs = OutputsOf(problem_);
    for (int64_t first = 0; first < outputs && wrong.empty();) {
      const Schedule schedule = MakeSchedule(problem_, resident_, workspace_ - packed_, first);
      if (problem_.depth > 0) wrong = LaunchSums(schedule, buffers, stream);
      if (wrong.empty()) wrong = LaunchFinish(schedule, buffers, stream);
      first += schedule.outputs;
    }
    return wrong;
  }

 private:
  float* SlotsOf(const Buffers& buffers) const {
    return reinterpret_cast<float*>(static_cast<char*>(buffers.workspace) + packed_);
  }

  // `overlaps`: the launch may begin before the one before it has ended, and waits by itself.
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

  std::string LaunchPack(const Buffers& buffers, cudaStream_t stream) const {
    const PackArguments arguments = PackArgumentsFor(problem_, buffers);
    const int64_t blocks = (arguments.lines + kPackThreads - 1) / kPackThreads;
    return Launch("sm80_w8a16 pack", LaunchOf(blocks, kPackThreads, 0, stream), false,
                  PackActivations, arguments);
  }

  std::string LaunchSums(const Schedule& schedule, const Buffers& buffers,
                         cudaStream_t stream) const {
    Arguments arguments = ArgumentsFor(problem_, buffers);
    arguments.schedule = schedule;
    arguments.slots = SlotsOf(buffers);
    if (packed_ > 0) {
      arguments.activations = static_cast<const uint16_t*>(buffers.workspace);
      const int64_t tiles = int64_t{schedule.row_tiles} * schedule.depth_tiles;
      const int64_t batch = tiles * PackedBytes(EightsFor(problem_)) / 2;
      arguments.activation_batch = problem_.lhs.batch == 0 ? 0 : batch;
    }
    const auto shared = static_cast<size_t>(SharedBytes(EightsFor(problem_)));
    const bool overlaps = packed_ > 0 && schedule.first == 0;
    return Launch("sm80_w8a16", LaunchOf(schedule.blocks, kThreads, shared, stream), overlaps,
                  kernel_, arguments);
  }

  std::string LaunchFinish(const Schedule& schedule, const Buffers& buffers,
                           cudaStream_t stream) const {
    FinishArguments arguments = FinishArgumentsFor(problem_, buffers);
    arguments.schedule = schedule;
    arguments.slots = SlotsOf(buffers);
    arguments.ways = WaysFor(schedule);
    const int64_t resident = int64_t{kFinishBlocks} * device_.multiprocessors;
    const int at_once = kFinishWarps / arguments.ways;
    const int most = (arguments.lines + at_once - 1) / at_once;
    arguments.line_blocks =
        static_cast<int32_t>(std::clamp<int64_t>(resident / schedule.outputs, 1, most));
    const int64_t blocks = int64_t{schedule.outputs} * arguments.line_blocks;
    if (blocks >> 31) return "`sm80_w8a16` has more outputs than a launch has blocks";
    return Launch("sm80_w8a16 finish", LaunchOf(blocks, kFinishThreads, 0, stream),
                  problem_.depth > 0,
                  IsPlain(problem_) ? FinishOutputs<true> : FinishOutputs<false>, arguments);
  }

  Problem problem_;  // rhs is the 8-bit side
  Device device_;
  bool swapped_;
  size_t workspace_;
  KernelFunction kernel_ = nullptr;
  size_t packed_ = 0;     // bytes of packed activations, before the slots
  int64_t resident_ = 1;  // blocks at a time
};

std::unique_ptr<Plan> Make(const Problem& problem, const Device& device, size_t workspace,
                           std::string& wrong) {
  const Problem turned = WeightsRight(problem);
  auto plan = std::make_unique<W8A16Plan>(turned, device, WeightsOnTheLeft(problem), workspace);
  if (!Empty(turned)) wrong = plan->Prepare();
  if (!wrong.empty()) return nullptr;
  return plan;
}

}  // namespace
}  // namespace w8a16

const Path kSm80W8A16 = {"sm80_w8a16", w8a16::WhyNotEither, w8a16::Make};

}  // namespace jaxfp8::cuda
