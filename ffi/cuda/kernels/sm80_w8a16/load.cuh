// Filling a stage of `sm80_w8a16`: a tile of weights and one of activations, zeros past the depth.
//
// Columns and rows that are not there are not copied: what the stage holds in their place only
// reaches sums that nobody stores. Depths that are not there reach every sum.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_LOAD_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_LOAD_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/layout.h"

namespace jaxfp8::cuda::w8a16 {

// `there` clipped to [0, most].
__device__ __forceinline__ int Clip(int there, int most) { return max(0, min(there, most)); }

// 16 bytes, `bytes` of them there, where the alignment does not let one copy take them.
__device__ __forceinline__ void CopyNarrow(uint32_t to, const uint8_t* from, int bytes, int width) {
  if (width == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int there = Clip(bytes - 4 * i, 4);
      CopyAsync4(to + 4 * i, there > 0 ? from + 4 * i : from, there);
    }
    return;
  }
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < bytes) words[i / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i % 4));
  }
  StoreShared16(to, words);
}

// Eight activations one by one.
__device__ __forceinline__ void CopyScattered(uint32_t to, const uint16_t* from, int64_t stride,
                                              int count) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) words[i / 2] |= static_cast<uint32_t>(from[i * stride]) << (16 * (i % 2));
  }
  StoreShared16(to, words);
}

// Where a lane's copies of an output begin, and what there is to copy. Kept from tile to tile of
// the depth: with few rows the addresses would cost as much as the arithmetic.
//
// `kPacked`: tiles of activations lie in memory as they lie in a stage.
template <bool kDepthMajor, int kEights, bool kPacked>
class Loader {
 public:
  __device__ __forceinline__ void Start(const Arguments& a, const Place& place,
                                        int32_t depth_tile) {
    const int column = place.column_tile * kTileColumns;
    const int row = place.row_tile * (8 * kEights);
    const int depth = depth_tile * kTileDepth;
    columns_ = a.columns - column;
    rows_ = a.rows - row;
    depth_ = a.depth - depth;
    weights_ = a.weights + place.batch * a.weight_batch +
               ((kDepthMajor ? depth : column) + WeightLine()) * a.weight_line +
               (kDepthMajor ? column : depth) + 16 * WeightChunk();
    if constexpr (kPacked) {
      activations_ = a.activations + place.batch * a.activation_batch +
                     (int64_t{place.row_tile} * a.schedule.depth_tiles + depth_tile) * kTileWords +
                     8 * threadIdx.x;
    } else {
      activations_ = a.activations + place.batch * a.activation_batch +
                     (row + ActivationLine()) * a.activation_row +
                     (depth + 8 * ActivationChunk()) * a.activation_depth;
    }
  }

  // Copies of the tile's weights and activations, to where a stage has them.
  __device__ __forceinline__ void LoadWeights(const Arguments& a, uint32_t to,
                                              uint64_t policy) const {
    if (a.weight_width == 16 && depth_ >= kTileDepth) {
      LoadAllWeights(a, to, policy);
    } else {
      LoadSomeWeights(a, to);
    }
  }
  __device__ __forceinline__ void LoadActivations(const Arguments& a, uint32_t to) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        CopyAsync16(to + 16 * (threadIdx.x + i * kThreads), activations_ + 8 * i * kThreads);
      }
    } else if (a.activation_vectors && depth_ >= kTileDepth) {
      LoadAllActivations(a, to);
    } else {
      LoadSomeActivations(a, to);
    }
  }

  // To the next tile of the depth.
  __device__ __forceinline__ void Advance(const Arguments& a) {
    depth_ -= kTileDepth;
    weights_ += kDepthMajor ? kTileDepth * a.weight_line : kTileDepth;
    activations_ += kPacked ? kTileWords : kTileDepth * a.activation_depth;
  }

 private:
  static constexpr int kTileWords = PackedBytes(kEights) / 2;  // of 16 bits
  static_assert(PackedBytes(kEights) == kEights * kThreads * 16);
  static constexpr int kLinesAtOnce = kThreads / kWeightChunks;
  static constexpr int kRowsAtOnce = kThreads / kActivationChunks;
  static_assert(kRowsAtOnce == 8);

  __device__ __forceinline__ static int WeightChunk() { return threadIdx.x % kWeightChunks; }
  __device__ __forceinline__ static int WeightLine() { return threadIdx.x / kWeightChunks; }
  __device__ __forceinline__ static int ActivationChunk() {
    return threadIdx.x % kActivationChunks;
  }
  __device__ __forceinline__ static int ActivationLine() { return threadIdx.x / kActivationChunks; }
  __device__ __forceinline__ static uint32_t WeightOffset(int line) {
    return kDepthMajor ? DepthLineOffset(line, WeightChunk())
                       : ColumnLineOffset(line, WeightChunk());
  }
  // Columns from a chunk's first on: of its line, or of the lines from its own.
  __device__ __forceinline__ int ColumnsLeft() const {
    return columns_ - (kDepthMajor ? 16 * WeightChunk() : WeightLine());
  }

  __device__ __forceinline__ void LoadAllWeights(const Arguments& a, uint32_t to,
                                                 uint64_t policy) const {
    const int left = ColumnsLeft();
    const uint8_t* from = weights_;
#pragma unroll
    for (int line = 0; line < kWeightLines; line += kLinesAtOnce) {
      if (left > (kDepthMajor ? 0 : line)) {
        CopyAsync16(to + WeightOffset(line + WeightLine()), from, policy);
      }
      from += kLinesAtOnce * a.weight_line;
    }
  }

  // The end of the depth, or weights without alignment.
  __device__ __forceinline__ void LoadSomeWeights(const Arguments& a, uint32_t to) const {
    const uint8_t* from = weights_;
#pragma unroll 1
    for (int line = 0; line < kWeightLines; line += kLinesAtOnce) {
      const int left = ColumnsLeft() - (kDepthMajor ? 0 : line);
      if (left <= 0) break;
      const int there = kDepthMajor ? (line + WeightLine() < depth_ ? min(left, 16) : 0)
                                    : Clip(depth_ - 16 * WeightChunk(), 16);
      const uint32_t at = to + WeightOffset(line + WeightLine());
      if (a.weight_width == 16) {
        CopyAsync16(at, there > 0 ? from : a.weights, there);
      } else {
        CopyNarrow(at, there > 0 ? from : a.weights, there, a.weight_width);
      }
      from += kLinesAtOnce * a.weight_line;
    }
  }

  __device__ __forceinline__ void LoadAllActivations(const Arguments& a, uint32_t to) const {
    const uint16_t* from = activations_;
    const int left = rows_ - ActivationLine();
#pragma unroll
    for (int line = 0; line < 8 * kEights; line += kRowsAtOnce) {
      if (left > line) {
        CopyAsync16(to + ActivationOffset(line + ActivationLine(), ActivationChunk()), from);
      }
      from += kRowsAtOnce * a.activation_row;
    }
  }

  __device__ __forceinline__ void LoadSomeActivations(const Arguments& a, uint32_t to) const {
    const uint16_t* from = activations_;
    const int count = Clip(depth_ - 8 * ActivationChunk(), 8);
    const int end = min(8 * kEights, rows_);
#pragma unroll 1
    for (int line = ActivationLine(); line < end; line += kRowsAtOnce) {
      const uint32_t at = to + ActivationOffset(line, ActivationChunk());
      if (a.activation_vectors) {
        CopyAsync16(at, count > 0 ? from : a.activations, 2 * count);
      } else {
        CopyScattered(at, from, a.activation_depth, count);
      }
      from += kRowsAtOnce * a.activation_row;
    }
  }

  const uint8_t* weights_;
  const uint16_t* activations_;
  int columns_, rows_, depth_;  // left from the tile's first on
};

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_LOAD_CUH_
