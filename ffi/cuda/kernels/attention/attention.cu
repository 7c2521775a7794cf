// Launches attention of a decoding step.

#include <algorithm>

#include "cuda/kernels/attention/kernel.cuh"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/common/launch.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace attention {
namespace {

template <DType kCache, int kWidth>
cudaError_t Launch(const Arguments& a, cudaStream_t stream) {
  const int64_t tiles = a.p.texts * a.p.heads * a.tiles;
  LaunchShape shape = {.blocks = GridSize(tiles * a.parts), .threads = 32 * kWarps};
  if (a.cluster) shape.cluster.x = static_cast<unsigned>(a.parts);
  const cudaError_t status = KernelLaunch(shape, stream)(Attend<kCache, kWidth>, a);
  if (status != cudaSuccess || a.parts == 1 || a.cluster) return status;
  shape = {.blocks = GridSize(tiles * kTileRows), .threads = 1024, .early = true};
  return KernelLaunch(shape, stream)(CombineParts<Values<kCache, kWidth>, kWidth>, a);
}

cudaError_t Dispatch(const Arguments& a, cudaStream_t stream) {
  constexpr cudaError_t kOther = cudaErrorInvalidValue;
  return Visit<DType::kBF16, DType::kE4M3, DType::kS8>(a.p.cache, kOther, [&]<DType kCache>() {
    return Visit<64, 128, 256>(static_cast<int>(a.p.width), kOther,
                               [&]<int kWidth>() { return Launch<kCache, kWidth>(a, stream); });
  });
}

}  // namespace
}  // namespace attention

Status LaunchAttention(const AttentionProblem& problem, const AttentionBuffers& buffers,
                       const Device& device, cudaStream_t stream) {
  if (problem.texts * problem.heads * problem.rows == 0) return {};
  const attention::Schedule schedule =
      attention::ScheduleOf(problem, device, buffers.scratch_bytes);
  const attention::Arguments a = {problem, buffers, static_cast<int32_t>(schedule.tiles),
                                  static_cast<int32_t>(schedule.parts), schedule.cluster};
  return CudaError(attention::Dispatch(a, stream), "attention");
}

}  // namespace jaxfp8::cuda
