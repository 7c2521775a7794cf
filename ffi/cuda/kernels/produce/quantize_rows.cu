// Norm or gate, amax, scale and codes of a row in one pass over memory.
//
//   x [rows, columns]   a row  | 16 bytes | 16 bytes | ...      `group` threads, 32 to 1024
//   registers           kChunks chunks a thread, all loads first; the producer replaces them
//   shared memory       sums and the maximum across warps
//   gain, shift         from the L1 cache, where every row of an SM finds them
//   codes, scale        from the same registers

#include <algorithm>

#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/produce/problem.h"
#include "cuda/kernels/produce/produce.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {

// A thread's part of a row. A chunk exists as a whole or not at all; one that does not is zeros.
//   kChunks  chunks of a thread
//   group    threads of a row, a power of two from 32 to 1024
template <int kChunks>
struct RowPart {
  uint32_t words[kChunks][kWords];
  int64_t start;     // of the row, in elements
  int first, group;  // the first element of the thread in its row, and the threads of a row
  int columns;       // 0 where the thread has no row

  __device__ __forceinline__ int At(int i) const { return first + i * group * kRowValues; }
};

template <int kChunks>
__device__ __forceinline__ void LoadRow(const void* x, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (uint32_t& word : row.words[i]) word = 0;
    if (row.At(i) < row.columns) LoadOnce(x, row.start + row.At(i), row.words[i]);
  }
}

__device__ __forceinline__ void Prefetch(const void* vector, DType type, int at) {
  const char* from = static_cast<const char*>(vector) + int64_t{at} * (type == DType::kF32 ? 4 : 2);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Asks for gain and shift while the row is on its way: with few rows each is a wait for memory.
template <int kChunks>
__device__ __forceinline__ void PrefetchVectors(const RowsProblem& p, const RowsBuffers& b,
                                                const RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    if (b.gain) Prefetch(b.gain, p.gain, row.At(i));
    if (b.shift) Prefetch(b.shift, p.shift, row.At(i));
  }
}

template <DType kIn, bool kCentred, int kChunks>
__device__ __forceinline__ Moments MomentsOf(const RowsProblem& p, const RowPart<kChunks>& row,
                                             float (&shared)[2][32]) {
  float values[kRowValues], mean = 0.0f, squares = 0.0f;
  const float count = static_cast<float>(p.columns);
  if constexpr (kCentred) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      DecodeChunk<kIn>(row.words[i], values);
#pragma unroll
      for (float value : values) sum += value;
    }
    mean = SumOfGroup(sum, row.group, shared[0]) / count;
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    DecodeChunk<kIn>(row.words[i], values);
    if (row.At(i) >= row.columns) break;
#pragma unroll
    for (float value : values) {
      const float centred = kCentred ? value - mean : value;
      squares = fmaf(centred, centred, squares);
    }
  }
  return {mean, rsqrtf(SumOfGroup(squares, row.group, shared[1]) / count + p.epsilon)};
}

template <DType kIn, bool kCentred, int kChunks>
__device__ __forceinline__ void Normalize(const RowsProblem& p, const RowsBuffers& b,
                                          Moments moments, RowPart<kChunks>& row) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    NormalizeChunk<kIn, kCentred>(p, b, moments, row.At(i), row.words[i]);
  }
}

// activation(x) * factor. Chunks that do not exist stay zeros.
template <DType kIn, int kChunks>
__device__ __forceinline__ void ApplyElementwise(const RowsProblem& p, const RowsBuffers& b,
                                                 RowPart<kChunks>& row) {
  if (p.activation == Activation::kNone && !p.has_factor) return;
  RowPart<kChunks> factor = row;
  if (p.has_factor) LoadRow(b.factor, factor);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) ActivateChunk<kIn>(p, factor.words[i], row.words[i]);
}

// The elementwise maximum of two words of magnitudes; NaN is above all.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxOrNan(uint32_t largest, uint32_t x) {
  uint32_t result;
  if constexpr (kIn == DType::kBF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(x & 0x7fff7fffu));
  }
  return result;
}

// The amax of a row. As integers, the bits of magnitudes are in their order, NaN above all.
template <DType kIn, int kChunks>
__device__ __forceinline__ float AmaxOf(const RowPart<kChunks>& row, uint32_t* shared) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (uint32_t word : row.words[i]) packed = MaxOrNan<kIn>(packed, word);
  }
  float values[2];
  DecodeWord<kIn>(packed, values);
  const uint32_t largest = max(BitsOf(values[0]), BitsOf(values[1]));
  return FloatFromBits(MaxOfGroup(largest, row.group, shared));
}

template <DType kOut>
__device__ __forceinline__ float ScaleOfRow(const RowsProblem& p, float amax) {
  if (amax == 0.0f) return p.of_zeros;
  if (amax != amax) return p.of_nan;
  constexpr float kPer = 1.0f / kHighest<kOut>;
  return fmaxf(fmaxf(amax, p.amax_floor) * kPer, p.scale_floor);
}

// Divides a row by its scale and stores its codes.
template <DType kIn, DType kOut, int kChunks, typename Divide>
__device__ __forceinline__ void StoreRow(const RowPart<kChunks>& row, uint8_t* to, Divide divide) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (row.At(i) >= row.columns) break;
    uint32_t codes[kRowValues / 4];
    DivideChunk<kIn, kOut>(row.words[i], divide, codes);
    StoreCodes(to + row.At(i), kRowValues, true, codes);
  }
}

template <DType kIn, DType kOut, Producer kProducer, int kChunks>
__global__ void __launch_bounds__(1024)
    QuantizeProduced(const RowsProblem p, const RowsBuffers b, int group) {
  __shared__ float sums[2][32];
  __shared__ uint32_t maxima[32];
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / group) + threadIdx.x / group;
  const bool in_bounds = index < p.rows;
  RowPart<kChunks> row;
  row.start = index * p.columns, row.columns = in_bounds ? static_cast<int>(p.columns) : 0;
  row.first = static_cast<int>(threadIdx.x) % group * kRowValues, row.group = group;
  LoadRow(b.x, row);
  if constexpr (kProducer == Producer::kElementwise) {
    ApplyElementwise<kIn>(p, b, row);
  } else {
    constexpr bool kCentred = kProducer == Producer::kLayerNorm;
    PrefetchVectors(p, b, row);
    Normalize<kIn, kCentred>(p, b, MomentsOf<kIn, kCentred>(p, row, sums), row);
  }
  const float amax = AmaxOf<kIn>(row, maxima), scale = ScaleOfRow<kOut>(p, amax);
  if (!in_bounds) return;
  if (row.first == 0) b.scale[index] = scale, b.amax[index] = amax;
  const FloatDivisor divisor = MakeFloatDivisor(scale == 0.0f && IsFloat8(kOut) ? NAN : scale);
  uint8_t* codes = static_cast<uint8_t*>(b.codes) + row.start;
  if (InRange(amax, divisor)) {
    StoreRow<kIn, kOut>(row, codes, [=](float x) { return QuotientInRange(x, divisor); });
  } else {
    StoreRow<kIn, kOut>(row, codes, [=](float x) { return Quotient(x, divisor); });
  }
}

namespace {

// Up to this many rows two chunks a thread are faster: 64 rows of 4096 took 3.1 us, with four 3.6;
// 2048 rows took 14.6 and 14.2 (H100, one set of operands over and over).
constexpr int64_t kFewRows = 1024;
constexpr int kMinThreads = 128;  // of a block

template <DType kIn, DType kOut, Producer kProducer, int kChunks>
cudaError_t LaunchWith(const RowsProblem& p, const RowsBuffers& b, cudaStream_t stream) {
  int group = 32;
  while (group < 1024 && int64_t{group} * kChunks * kRowValues < p.columns) group *= 2;
  // A block of one row waits for no other: 8192 rows of 4096 took 43.6 us, with two rows 45.3.
  const int threads = std::max(group, kMinThreads);
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
  return CudaError(Dispatch(problem, buffers, stream), "quantizing rows");
}

}  // namespace jaxfp8::cuda
