// Launches the kernel that produces values and encodes them.

#include "common/shapes.h"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/encode/kernel.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

template <DType kIn, DType kOut, Producer kProducer>
cudaError_t Launch(const EncodeProblem& p, const EncodeBuffers& b, cudaStream_t stream) {
  const unsigned blocks =
      GridSize(TileCount(p.rows, kTransposeTile) * TileCount(p.columns, kTransposeTile));
  EncodeProduced<kIn, kOut, kProducer><<<blocks, kEncodeThreads, 0, stream>>>(p, b);
  return cudaGetLastError();
}

cudaError_t Dispatch(const EncodeProblem& p, const EncodeBuffers& b, cudaStream_t stream) {
  constexpr cudaError_t kOther = cudaErrorInvalidValue;
  return Visit<DType::kBF16, DType::kF16>(p.in, kOther, [&]<DType kIn>() {
    return Visit<DType::kE4M3, DType::kE5M2>(p.out, kOther, [&]<DType kOut>() {
      return Visit<Producer::kElementwise, Producer::kRmsNorm, Producer::kLayerNorm,
                   Producer::kCast>(p.producer, kOther, [&]<Producer kProducer>() {
        return Launch<kIn, kOut, kProducer>(p, b, stream);
      });
    });
  });
}

}  // namespace

Status LaunchEncode(const EncodeProblem& problem, const EncodeBuffers& buffers,
                    cudaStream_t stream) {
  cudaError_t status = cudaMemsetAsync(buffers.amax, 0, sizeof(float), stream);
  if (status == cudaSuccess && problem.rows > 0) status = Dispatch(problem, buffers, stream);
  return CudaError(status, "producing and encoding");
}

}  // namespace jaxfp8::cuda
