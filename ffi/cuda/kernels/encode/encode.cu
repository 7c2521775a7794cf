// Launches the kernel that produces values and encodes them.

#include "common/shapes.h"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/encode/kernel.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

template <DType kIn, DType kOut, Producer kProducer>
void Launch(const EncodeProblem& p, const EncodeBuffers& b, cudaStream_t stream) {
  const unsigned blocks =
      GridSize(TileCount(p.rows, kTransposeTile) * TileCount(p.columns, kTransposeTile));
  EncodeProduced<kIn, kOut, kProducer><<<blocks, kEncodeThreads, 0, stream>>>(p, b);
}

template <DType kIn, DType kOut>
cudaError_t LaunchAs(const EncodeProblem& p, const EncodeBuffers& b, cudaStream_t stream) {
  switch (p.producer) {
    case Producer::kElementwise:
      Launch<kIn, kOut, Producer::kElementwise>(p, b, stream);
      break;
    case Producer::kRmsNorm:
      Launch<kIn, kOut, Producer::kRmsNorm>(p, b, stream);
      break;
    case Producer::kLayerNorm:
      Launch<kIn, kOut, Producer::kLayerNorm>(p, b, stream);
      break;
    case Producer::kCast:
      Launch<kIn, kOut, Producer::kCast>(p, b, stream);
      break;
  }
  return cudaGetLastError();
}

cudaError_t Dispatch(const EncodeProblem& p, const EncodeBuffers& b, cudaStream_t stream) {
  return Visit<DType::kBF16, DType::kF16>(p.in, cudaErrorInvalidValue, [&]<DType kIn>() {
    return Visit<DType::kE4M3, DType::kE5M2>(p.out, cudaErrorInvalidValue, [&]<DType kOut>() {
      return LaunchAs<kIn, kOut>(p, b, stream);
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
