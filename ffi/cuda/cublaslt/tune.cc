#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>

#include "cuda/cublaslt/matmul.h"

namespace jaxfp8::cuda {
namespace {

// Smaller products take a few microseconds with any algorithm.
constexpr double kMinTimedMultiplications = double{1 << 26};
// The most device memory to use: the rest belongs to the program.
constexpr size_t kMaxTimedBytes = size_t{2} << 30;
constexpr size_t kPatternBytes = size_t{1} << 20;
// How long each algorithm runs, after a warm-up run.
constexpr float kMilliseconds = 2;
constexpr int kMinRuns = 3;
constexpr int kMaxRuns = 50;

size_t SizeOfType(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
    case CUDA_R_8I:
      return 1;
    case CUDA_R_16BF:
    case CUDA_R_16F:
      return 2;
    default:
      return 4;
  }
}

size_t MatrixBytes(int64_t lines, int64_t pitch, int64_t batch, int64_t stride,
                   cudaDataType_t type) {
  return (lines * pitch + (batch - 1) * stride) * SizeOfType(type);
}

constexpr size_t kScalarBytes = 256;

// Memory, a stream and events for timing. After any failure `ok()` is false and nothing is timed.
class Bench {
 public:
  Bench() {
    Keep(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Keep(cudaEventCreate(&begin_));
    Keep(cudaEventCreate(&end_));
  }
  ~Bench() {
    for (void* block : blocks_) cudaFreeAsync(block, stream_);
    if (stream_) cudaStreamSynchronize(stream_);
    if (begin_) cudaEventDestroy(begin_);
    if (end_) cudaEventDestroy(end_);
    if (stream_) cudaStreamDestroy(stream_);
    cudaGetLastError();  // clears errors of timing: they do not affect the caller
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void* Take(size_t bytes) {
    void* block = nullptr;
    if (!ok_ || bytes == 0) return nullptr;
    Keep(cudaMallocAsync(&block, bytes, stream_));
    if (block) blocks_.push_back(block);
    return block;
  }

  // Random bytes without the top bit of the exponent: finite numbers of both signs in every type.
  // Zeros would be multiplied faster than real data.
  void* TakeRandom(size_t bytes) {
    void* block = Take(bytes);
    if (!block) return nullptr;
    static const std::vector<uint8_t> pattern = [] {
      std::vector<uint8_t> made(kPatternBytes);
      std::minstd_rand random(1);
      for (uint8_t& byte : made) byte = static_cast<uint8_t>((random() >> 8) & 0xbf);
      return made;
    }();
    for (size_t at = 0; at < bytes; at += kPatternBytes) {
      Keep(cudaMemcpyAsync(static_cast<char*>(block) + at, pattern.data(),
                           std::min(kPatternBytes, bytes - at), cudaMemcpyHostToDevice, stream_));
    }
    return block;
  }

  // The mean milliseconds of `runs` runs; infinity if one fails.
  template <typename Run>
  float Time(int runs, const Run& run) {
    float milliseconds = 0;
    Keep(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < runs && ok_; ++i) {
      if (!run(stream_).ok()) return std::numeric_limits<float>::infinity();
    }
    Keep(cudaEventRecord(end_, stream_));
    Keep(cudaEventSynchronize(end_));
    Keep(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return ok_ ? milliseconds / static_cast<float>(runs) : std::numeric_limits<float>::infinity();
  }

  bool ok() const { return ok_; }

 private:
  void Keep(cudaError_t status) { ok_ = ok_ && status == cudaSuccess; }

  bool ok_ = true;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<void*> blocks_;
};

// Vector and block scales have at most one value per line and block of 128.
size_t ScaleBytes(int64_t lines, int64_t depth) {
  return 4 * static_cast<size_t>(lines + 4) * static_cast<size_t>(depth / 128 + 4);
}

MatmulBuffers TakeBuffers(const MatmulShape& s, size_t workspace_bytes, Bench& bench) {
  const size_t a = MatrixBytes(s.plain_a ? s.k : s.m, s.lda, s.batch, s.batch_a, s.a);
  const size_t b = MatrixBytes(s.transposed_b ? s.k : s.n, s.ldb, s.batch, s.batch_b, s.b);
  const size_t d = MatrixBytes(s.n, s.ldd, s.batch, s.batch_d, s.d);
  MatmulBuffers out;
  if (a + b + d > kMaxTimedBytes) return out;
  out.a = bench.TakeRandom(a);
  out.b = bench.TakeRandom(b);
  out.d = bench.Take(d);
  out.c = s.add_c ? out.d : nullptr;
  if (s.scale_a) out.scale_a = static_cast<float*>(bench.TakeRandom(ScaleBytes(s.m, s.k)));
  if (s.scale_b) out.scale_b = static_cast<float*>(bench.TakeRandom(ScaleBytes(s.n, s.k)));
  // One number each.
  if (s.scale_d) out.scale_d = static_cast<float*>(bench.TakeRandom(kScalarBytes));
  if (s.amax_d) out.amax_d = static_cast<float*>(bench.Take(kScalarBytes));
  out.workspace = bench.Take(workspace_bytes);
  out.workspace_bytes = workspace_bytes;
  return out;
}

}  // namespace

bool WorthTiming(const MatmulShape& s) {
  const double lines = static_cast<double>(s.batch) * static_cast<double>(s.m);
  return lines * static_cast<double>(s.n) * static_cast<double>(s.k) >= kMinTimedMultiplications;
}

int Fastest(const MatmulShape& shape, size_t workspace_bytes,
            const std::vector<cublasLtMatmulAlgo_t>& algorithms, const RunAlgorithm& run) {
  Bench bench;
  const MatmulBuffers buffers = TakeBuffers(shape, workspace_bytes, bench);
  if (!bench.ok() || !buffers.d) return -1;
  int best = -1;
  float least = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < algorithms.size(); ++i) {
    const auto once = [&](cudaStream_t stream) { return run(algorithms[i], buffers, stream); };
    bench.Time(1, once);
    const float first = bench.Time(1, once);
    const float wanted =
        std::clamp(kMilliseconds / std::max(first, 1e-3f), float{kMinRuns}, float{kMaxRuns});
    const float time = bench.Time(static_cast<int>(wanted), once);
    if (time < least) best = static_cast<int>(i);
    least = std::min(least, time);
  }
  return bench.ok() ? best : -1;
}

}  // namespace jaxfp8::cuda
