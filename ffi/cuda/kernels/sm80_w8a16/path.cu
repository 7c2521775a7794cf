// The host side of path "sm80_w8a16": bfloat16 or float16 activations times 8-bit weights, read as
// they are stored.
//
// For skinny M, bound by reading the weights; correct for any number of rows. Either side may be
// the 8-bit one. A call has one launch; before sm_90 a split K adds a second:
//   Sm80W8A16         product, split-K reduction in a cluster, and epilogue (mainloop.cuh)
//   ReducePartials    reduction and epilogue on devices without clusters, below
// Several products of one input may share the launch (plan.h).

#include <algorithm>

#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/sm80_w8a16/plan.h"
#include "cuda/kernels/sm80_w8a16/split_k.cuh"

namespace jaxfp8::cuda {
namespace w8a16 {

// The second kernel of `sm80_w8a16` on devices without clusters, for a split K. It adds the sums of
// all ranks of a tile from the workspace, and applies the epilogue (split_k.cuh).

// The sums of all ranks in the workspace, written by the kernel before.
struct WorkspaceSums {
  const float* at;
  int64_t rank_stride;

  __device__ __forceinline__ float4 Load(int rank, int row, int column) const {
    return __ldg(
        reinterpret_cast<const float4*>(at + rank * rank_stride + row * kTileColumns + column));
  }
  __device__ __forceinline__ void Wait() const {}
};

inline constexpr int kReduceThreads = 128;

// A CTA adds up 128 quads of an output tile.
//   blockIdx.x   the output tile
//   blockIdx.y   the block's quads
//   blockIdx.z   the outer batch index
__global__ void __launch_bounds__(kReduceThreads)
    ReducePartials(const __grid_constant__ Arguments a, int tile_rows) {
  const int64_t stride = int64_t{min(a.rows, tile_rows)} * kTileColumns;
  const WorkspaceSums sums{a.partials + OutputTileOfBlock() * a.schedule.split * stride, stride};
  const int quad = blockIdx.y * kReduceThreads + threadIdx.x;
  StoreTile(a, TileOfBlock(a, blockIdx.x, tile_rows), tile_rows, quad, gridDim.y * kReduceThreads,
            sums);
}

namespace {

bool Empty(const Problem& problem) {
  return problem.batch == 0 || problem.rows == 0 || problem.columns == 0;
}

cudaLaunchConfig_t LaunchOf(dim3 blocks, int threads, size_t shared, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return config;
}

template <class AnyPlan>
Status MakePlan(std::span<const Problem> problems, const Gate& gate, const Device& device,
                size_t workspace, std::unique_ptr<AnyPlan>& plan) {
  auto made = std::make_unique<W8A16Plan>(problems, gate, device, workspace);
  JAXFP8_RETURN_IF_ERROR(made->Prepare());
  plan = std::move(made);
  return {};
}

Status Make(const Problem& problem, const Device& device, size_t workspace,
            std::unique_ptr<Plan>& plan) {
  return MakePlan({&problem, 1}, {}, device, workspace, plan);
}

}  // namespace

W8A16Plan::W8A16Plan(std::span<const Problem> problems, const Gate& gate, const Device& device,
                     size_t workspace)
    : gate_(gate), device_(device), workspace_(workspace) {
  for (const Problem& problem : problems) {
    problems_.push_back(WithWeightsOnRight(problem));
    swapped_.push_back(HasWeightsOnLeft(problem));
  }
  joint_ = JointProblem(problems_);
}

Launch W8A16Plan::LaunchKind() const {
  if (gate_) return Launch::kGated;
  return problems_.size() > 1 ? Launch::kSeveral : Launch::kOne;
}

Status W8A16Plan::Prepare() {
  if (Empty(joint_)) return {};
  kernel_ = KernelOf(joint_, LaunchKind());
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel_);
  if (status != cudaSuccess) return CudaError(status, "cudaFuncGetAttributes");
  // The target of the device's code: the driver may have translated it from PTX of an older
  // architecture.
  clusters_ = attributes.ptxVersion >= 90;
  if (gate_ && !clusters_) return "the library has no kernel with a gate for this device";
  status = cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, Shared());
  if (status != cudaSuccess) return CudaError(status, "cudaFuncSetAttribute");
  int blocks = 0;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_, kThreads, Shared());
  if (status != cudaSuccess) {
    return CudaError(status, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  }
  if (blocks == 0) return "`sm80_w8a16` does not fit on a multiprocessor of the device";
  Capacity capacity = CapacityOf(joint_, device_.multiprocessors, blocks, workspace_);
  if (clusters_) {
    capacity.in_waves = true;
    JAXFP8_RETURN_IF_ERROR(CountClusters(capacity));
  }
  schedule_ = MakeSchedule(joint_, capacity);
  tiles_ = PartTilesOf(problems_);
  return {};
}

Status W8A16Plan::RunAll(std::span<const Buffers> given, cudaStream_t stream) const {
  JointArguments parts{};
  parts.tiles = tiles_;
  for (size_t i = 0; i < problems_.size(); ++i) {
    const Buffers buffers = swapped_[i] ? Swapped(given[i]) : given[i];
    JAXFP8_RETURN_IF_ERROR(ClearAmax(problems_[i], buffers, stream));
    parts.of[i] = ArgumentsFor(problems_[i], buffers);
    parts.of[i].schedule = PartSchedule(problems_[i], schedule_);
    parts.of[i].partials = static_cast<float*>(buffers.workspace);
    if (gate_) parts.of[i].epilogue.rounded = gate_.rounded[i];
  }
  if (Empty(joint_)) return {};
  JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(given.front().workspace_bytes, workspace_));
  JAXFP8_RETURN_IF_ERROR(LaunchMainloop(parts, stream));
  if (schedule_.split == 1 || clusters_) return {};
  return LaunchReduce(parts.of[0], stream);
}

// How many clusters of each size run at a time. Fewer than CTAs divided by their size, since a
// cluster has to fit a group of multiprocessors of which devices have more and less whole ones.
Status W8A16Plan::CountClusters(Capacity& capacity) const {
  for (int split = 2; split <= kMaxSplit; ++split) {
    capacity.tiles[split] = 0;
    if (InCluster() * split > kMaxSplit) continue;
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t config =
        LaunchOfClusters(InCluster() * split * OuterBatch(joint_), split, nullptr, attribute);
    int clusters = 0;
    const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel_, &config);
    if (status != cudaSuccess) return CudaError(status, "cudaOccupancyMaxActiveClusters");
    capacity.tiles[split] = InCluster() * clusters;
  }
  return {};
}

// attribute: belongs to the launch and must live as long
cudaLaunchConfig_t W8A16Plan::LaunchOfClusters(int64_t tiles, int split, cudaStream_t stream,
                                               cudaLaunchAttribute& attribute) const {
  const auto outer = static_cast<unsigned>(OuterBatch(joint_));
  const auto products = static_cast<unsigned>(InCluster());
  const dim3 blocks(static_cast<unsigned>(tiles) / outer / products,
                    static_cast<unsigned>(split) * products, outer);
  cudaLaunchConfig_t config = LaunchOf(blocks, kThreads, Shared(), stream);
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 1, attribute.val.clusterDim.y = blocks.y;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = clusters_ && blocks.y > 1 ? 1 : 0;
  return config;
}

Status W8A16Plan::LaunchMainloop(const JointArguments& parts, cudaStream_t stream) const {
  cudaLaunchAttribute attribute = {};
  const cudaLaunchConfig_t config =
      LaunchOfClusters(schedule_.output_tiles, schedule_.split, stream, attribute);
  return CudaError(cudaLaunchKernelEx(&config, kernel_, parts), "sm80_w8a16");
}

Status W8A16Plan::LaunchReduce(const Arguments& arguments, cudaStream_t stream) const {
  const int tile_rows = 8 * RowFragmentsFor(joint_);
  const int quads = std::min(arguments.rows, tile_rows) * kTileColumns / 4;
  const auto blocks = static_cast<unsigned>((quads + kReduceThreads - 1) / kReduceThreads);
  const auto outer = static_cast<unsigned>(OuterBatch(joint_));
  const cudaLaunchConfig_t config =
      LaunchOf(dim3(static_cast<unsigned>(schedule_.output_tiles) / outer, blocks, outer),
               kReduceThreads, 0, stream);
  return CudaError(cudaLaunchKernelEx(&config, ReducePartials, arguments, tile_rows),
                   "sm80_w8a16 reduce");
}

Status PlanJoint(std::span<const Problem> problems, const Gate& gate, const Device& device,
                 std::unique_ptr<W8A16Plan>& plan) {
  std::vector<Problem> oriented;
  for (const Problem& problem : problems) oriented.push_back(WithWeightsOnRight(problem));
  JAXFP8_RETURN_IF_ERROR(WhyNotGated(oriented, gate, device));
  return MakePlan(problems, gate, device, 0, plan);
}

}  // namespace w8a16

const Path kSm80W8A16 = {"sm80_w8a16", w8a16::WhyNotEither, w8a16::Make, true, true, true};

}  // namespace jaxfp8::cuda
