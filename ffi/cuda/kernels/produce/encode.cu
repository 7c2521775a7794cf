// Produces 128 x 128 values a block and encodes them with each scale, from the block's registers.
//
//   x, factor    a thread holds 4 consecutive rows of 16 bytes
//   mean, inverse, gain, shift   from the caches
//   y            in place of x; raises the amax
//   codes        for each scale: from registers, and transposed through shared memory

#include "common/shapes.h"
#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/produce/problem.h"
#include "cuda/kernels/produce/produce.cuh"
#include "cuda/kernels/quantize/tiles.cuh"
#include "cuda/path.h"

namespace jaxfp8::cuda {

inline constexpr int kEncodeThreads = 512;

template <DType kIn>
using EncodeTile = Tile<kIn, kEncodeThreads>;

// Where a thread's values lie: rows from `row` on, eight columns from `column` on.
struct TilePlace {
  int64_t top, left;  // of the block
  int row, column;    // in the block
  int64_t rows, columns;

  __device__ __forceinline__ bool Holds(int i) const {
    return top + row + i < rows && left + column < columns;
  }
  __device__ __forceinline__ int64_t At(int i) const {
    return (top + row + i) * columns + left + column;
  }
};

// What was written last is in the L2 cache still. So begin there. The two halves of a warp have
// words of `CodesSharedWord` that are 2 apart.
__device__ __forceinline__ TilePlace PlaceOfThread(const EncodeProblem& p) {
  constexpr int kAcross = kTransposeTile / kRowValues;  // threads of a row
  const int64_t tiles_across = (p.columns + kTransposeTile - 1) / kTransposeTile;
  const int64_t index = gridDim.x - 1 - blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int word = warp / 2 * 4 + warp % 2 + thread / kAcross % 2 * 2;
  return {index / tiles_across * kTransposeTile,
          index % tiles_across * kTransposeTile,
          word * 4,
          thread % kAcross * kRowValues,
          p.rows,
          p.columns};
}

template <DType kIn>
__device__ __forceinline__ void LoadTile(const void* x, const TilePlace& place,
                                         EncodeTile<kIn>& tile) {
#pragma unroll
  for (int i = 0; i < EncodeTile<kIn>::kRowsPerThread; ++i) {
#pragma unroll
    for (uint32_t& word : tile.words[i]) word = 0;
    if (place.Holds(i)) LoadOnce(x, place.At(i), tile.words[i]);
  }
}

template <DType kIn>
__device__ __forceinline__ void LoadRounded(const void* x, const TilePlace& place,
                                            EncodeTile<kIn>& tile) {
#pragma unroll
  for (int i = 0; i < EncodeTile<kIn>::kRowsPerThread; ++i) {
    float values[kRowValues] = {};
    if (place.Holds(i)) LoadVector<kIn>(x, DType::kF32, place.At(i), values);
    EncodeChunk<kIn>(values, tile.words[i]);
  }
}

// The producer's values; zeros where there are none.
template <DType kIn, Producer kProducer>
__device__ __forceinline__ void ProduceTile(const EncodeProblem& p, const EncodeBuffers& b,
                                            const TilePlace& place, EncodeTile<kIn>& tile) {
  constexpr int kRows = EncodeTile<kIn>::kRowsPerThread;
  if constexpr (kProducer == Producer::kCast) {
    LoadRounded<kIn>(b.x, place, tile);
  } else if constexpr (kProducer == Producer::kElementwise) {
    EncodeTile<kIn> factor;
    LoadTile<kIn>(b.x, place, tile);
    if (p.has_factor) LoadTile<kIn>(b.factor, place, factor);
#pragma unroll
    for (int i = 0; i < kRows; ++i) ActivateChunk<kIn>(p, factor.words[i], tile.words[i]);
  } else {
    constexpr bool kCentred = kProducer == Producer::kLayerNorm;
    LoadTile<kIn>(b.x, place, tile);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!place.Holds(i)) continue;
      const int64_t r = place.top + place.row + i;
      const Moments moments{kCentred ? __ldg(b.mean + r) : 0.0f, __ldg(b.inverse + r)};
      NormalizeChunk<kIn, kCentred>(p, b, moments, place.left + place.column, tile.words[i]);
    }
  }
}

// The largest magnitude of a thread's values, as bits. NaN does not count, infinities do.
template <DType kIn>
__device__ __forceinline__ uint32_t MaxOfThread(const EncodeTile<kIn>& tile) {
  uint32_t packed = 0;
#pragma unroll
  for (const auto& words : tile.words) packed = MaxMagnitudes<kIn>(words, packed);
  return MaxBits<kIn>(packed);
}

// The same without infinities.
template <DType kIn>
__device__ __noinline__ uint32_t MaxFiniteOfThread(EncodeTile<kIn> tile) {
  for (auto& words : tile.words) {
    for (uint32_t& word : words) word = FiniteMagnitudes<kIn>(word);
  }
  return MaxOfThread<kIn>(tile);
}

// Divides a thread's values by a scale, and stores their codes in one layout or in both.
template <DType kIn, DType kOut, typename Divide>
__device__ __forceinline__ void EncodeTo(const EncodeProblem& p, const TilePlace& place,
                                         const EncodeTile<kIn>& tile, Divide divide, uint8_t* to,
                                         uint8_t* transposed, uint32_t* stage) {
  uint32_t codes[EncodeTile<kIn>::kRowsPerThread][kRowValues / 4];
#pragma unroll
  for (int i = 0; i < EncodeTile<kIn>::kRowsPerThread; ++i) {
    DivideChunk<kIn, kOut>(tile.words[i], divide, codes[i]);
    if (place.Holds(i)) StoreCodes(to + place.At(i), kRowValues, true, codes[i]);
  }
  if (!p.transposed) return;
  __syncthreads();  // the stage may still be read
  StageTransposed(codes, place.row, place.column, stage);
  __syncthreads();
  StoreTransposed(transposed, p.rows % 16 == 0, p.rows, p.columns, place.top, place.left, stage);
}

template <DType kIn, DType kOut, Producer kProducer>
__global__ void __launch_bounds__(kEncodeThreads, 2)
    EncodeProduced(const __grid_constant__ EncodeProblem p,
                   const __grid_constant__ EncodeBuffers b) {
  __shared__ uint32_t maxima[2][32];
  __shared__ uint32_t stage[kTransposeTile * kTransposeTile / 4];
  const TilePlace place = PlaceOfThread(p);
  EncodeTile<kIn> tile;
  ProduceTile<kIn, kProducer>(p, b, place, tile);
  const uint32_t largest = MaxOfGroup(MaxOfThread<kIn>(tile), kEncodeThreads, maxima[0]);
  uint32_t finite = largest;
  if (largest >= kInfinityBits) {
    finite = MaxOfGroup(MaxFiniteOfThread<kIn>(tile), kEncodeThreads, maxima[1]);
  }
  UpdateAmax(reinterpret_cast<uint32_t*>(b.amax), finite);
#pragma unroll 1
  for (int s = 0; s < p.scales; ++s) {
    const FloatDivisor divisor = MakeFloatDivisor(__ldg(b.scale[s]));
    if (InRange(FloatFromBits(largest), divisor)) {
      const auto divide = [=](float x) { return QuotientInRange(x, divisor); };
      EncodeTo<kIn, kOut>(p, place, tile, divide, b.codes[s], b.transposed[s], stage);
    } else {
      const auto divide = [=](float x) { return Quotient(x, divisor); };
      EncodeTo<kIn, kOut>(p, place, tile, divide, b.codes[s], b.transposed[s], stage);
    }
  }
}

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
