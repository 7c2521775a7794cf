// Launches attention of a decoding step.

#include <algorithm>

#include "cuda/kernels/attention/kernel.cuh"
#include "cuda/kernels/common/grid.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace attention {
namespace {

cudaError_t LaunchKernel(void (*kernel)(Arguments), const Arguments& a, int64_t ctas,
                         cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(GridSize(ctas));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(a.parts), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = a.cluster ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <DType kCache, int kWidth>
cudaError_t Launch(const Arguments& a, cudaStream_t stream) {
  const int64_t tiles = a.p.texts * a.p.heads * a.tiles;
  const cudaError_t status = LaunchKernel(Attend<kCache, kWidth>, a, tiles * a.parts, stream);
  if (status != cudaSuccess || a.parts == 1 || a.cluster) return status;
  CombineParts<Values<kCache, kWidth>, kWidth><<<GridSize(tiles * kTileRows), 1024, 0, stream>>>(a);
  return cudaGetLastError();
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
