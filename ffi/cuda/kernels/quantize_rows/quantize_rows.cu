// Launches the kernel that produces and quantises rows.

#include <algorithm>

#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/quantize_rows/kernel.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

// Up to this many rows two chunks a thread are faster: 64 rows of 4096 took 3.1 us, with four 3.6;
// 2048 rows took 14.6 and 14.2 (H100, one set of operands over and over).
constexpr int64_t kFewRows = 1024;
constexpr int kFewestThreads = 128;  // of a block

template <DType kIn, DType kOut, Producer kProducer, int kChunks>
cudaError_t LaunchWith(const RowsProblem& p, const RowsBuffers& b, cudaStream_t stream) {
  int group = 32;
  while (group < 1024 && int64_t{group} * kChunks * kRowValues < p.columns) group *= 2;
  // A block of one row waits for no other: 8192 rows of 4096 took 43.6 us, with two rows 45.3.
  const int threads = std::max(group, kFewestThreads);
  const unsigned blocks = GridSize((p.rows + threads / group - 1) / (threads / group));
  QuantizeProduced<kIn, kOut, kProducer, kChunks><<<blocks, threads, 0, stream>>>(p, b, group);
  return cudaGetLastError();
}

template <DType kIn, DType kOut, Producer kProducer>
cudaError_t LaunchAs(const RowsProblem& p, const RowsBuffers& b, cudaStream_t stream) {
  const bool few = p.rows <= kFewRows && p.columns <= 1024 * 2 * kRowValues;
  return few ? LaunchWith<kIn, kOut, kProducer, 2>(p, b, stream)
             : LaunchWith<kIn, kOut, kProducer, 4>(p, b, stream);
}

cudaError_t Dispatch(const RowsProblem& p, const RowsBuffers& b, cudaStream_t stream) {
  constexpr cudaError_t kOther = cudaErrorInvalidValue;
  return Visit<DType::kBF16, DType::kF16>(p.in, kOther, [&]<DType kIn>() {
    return Visit<DType::kE4M3, DType::kE5M2, DType::kS8>(p.out, kOther, [&]<DType kOut>() {
      return Visit<Producer::kElementwise, Producer::kRmsNorm, Producer::kLayerNorm>(
          p.producer, kOther,
          [&]<Producer kProducer>() { return LaunchAs<kIn, kOut, kProducer>(p, b, stream); });
    });
  });
}

}  // namespace

Status LaunchRows(const RowsProblem& problem, const RowsBuffers& buffers, cudaStream_t stream) {
  if (problem.rows == 0) return {};
  return CudaError(Dispatch(problem, buffers, stream), "quantising rows");
}

}  // namespace jaxfp8::cuda
