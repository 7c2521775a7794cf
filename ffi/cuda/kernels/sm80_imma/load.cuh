// Copies one tile of an operand from global to shared memory.
//
//   global   rows of values, one after the other along an axis of stride 1
//              |  thread t: chunk t % kChunks of rows t / kChunks + i * kThreads / kChunks
//              |  cp.async of 16 bytes; where they are not aligned, value by value
//              v
//   shared   Layout (layout.h): CodeTile, WideTile or TransposedTile
//
// What lies past the end of an axis is 0, and adds nothing to a sum.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_LOAD_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_LOAD_CUH_

#include <type_traits>

#include "cuda/kernels/sm80_imma/arguments.h"
#include "cuda/kernels/sm80_imma/layout.h"
#include "cuda/kernels/sm80_imma/primitives.cuh"

namespace jaxfp8::cuda::imma {

// Copies the first `count` values of a chunk one by one and clears the rest.
template <int kElementBytes>
JAXFP8_DEVICE void CopyScattered(uint32_t to, const uint8_t* from, int64_t stride_bytes,
                                 int count) {
  using Element = std::conditional_t<kElementBytes == 1, uint8_t, uint16_t>;
  constexpr int kPerWord = 4 / kElementBytes;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16 / kElementBytes; ++i) {
    if (i < count) {
      const uint32_t bits = *reinterpret_cast<const Element*>(from + i * stride_bytes);
      words[i / kPerWord] |= bits << (8 * kElementBytes * (i % kPerWord));
    }
  }
  StoreShared(to, words);
}

// Copies tile after tile along K.
//   kAcross  the rows of the layout are depths; else they are lines
template <class Layout, bool kAcross>
class Copier {
 public:
  static constexpr int kBytes = Layout::kElementBytes, kPerChunk = 16 / kBytes;
  static constexpr int kRowsApart = kThreads / Layout::kChunks;
  static constexpr bool kAllThreads = Layout::kRows >= kRowsApart;
  static constexpr int kPasses = kAllThreads ? Layout::kRows / kRowsApart : 1;

  //   line   the first line of the tile; `lines`: those that exist
  //   depth  the first depth of the first tile; `depths`: those that exist
  JAXFP8_DEVICE Copier(const Operand& o, int64_t batch, int line, int lines, int depth,
                       int depths) {
    const int row = FirstRow(), chunk = ThreadIndex() % Layout::kChunks * kPerChunk;
    const int own_line = line + (kAcross ? chunk : LineOfRow(row));
    const int own_depth = depth + (kAcross ? row : chunk);
    values_ = static_cast<const uint8_t*>(o.values);
    from_ = values_ + (batch * o.batch + own_line * o.line + own_depth * o.depth) * kBytes;
    row_step_ = (kAcross ? o.depth : o.line) * kRowsApart * kBytes;
    value_step_ = (kAcross ? o.line : o.depth) * kBytes;
    tile_step_ = o.depth * kTileDepth * kBytes;
    lines_ = lines - own_line, depths_ = depths - own_depth;
    aligned_ = o.aligned;
  }

  // Starts the copies of the next tile.
  JAXFP8_DEVICE void Copy(uint32_t to) {
    if (kAllThreads || ThreadIndex() < Layout::kRows * Layout::kChunks) {
      if (aligned_) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          const int count = CountOf(i);
          CopyAsync16(to + PlaceOf(i), count > 0 ? from_ + i * row_step_ : values_, count * kBytes);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < kPasses; ++i) {
          CopyScattered<kBytes>(to + PlaceOf(i), from_ + i * row_step_, value_step_, CountOf(i));
        }
      }
    }
    from_ += tile_step_, depths_ -= kTileDepth;
  }

 private:
  JAXFP8_DEVICE static int FirstRow() { return ThreadIndex() / Layout::kChunks; }
  JAXFP8_DEVICE static int Clip(int count) {
    return count < 0 ? 0 : count < kPerChunk ? count : kPerChunk;
  }
  // Rows of weights are interleaved columns (layout.h).
  JAXFP8_DEVICE static int LineOfRow(int row) {
    return Layout::kRows == kTileColumns ? ColumnOfRow(row) : row;
  }

  // Of the thread's chunk in a pass: how many of its values exist, and where it goes.
  JAXFP8_DEVICE int CountOf(int pass) const {
    const bool exists = pass * kRowsApart < (kAcross ? depths_ : lines_);
    return exists ? Clip(kAcross ? lines_ : depths_) : 0;
  }
  JAXFP8_DEVICE static int PlaceOf(int pass) {
    return Layout::At(FirstRow() + pass * kRowsApart, ThreadIndex() % Layout::kChunks);
  }

  const uint8_t *values_, *from_;
  int64_t row_step_, value_step_, tile_step_;  // in bytes
  int lines_, depths_;                         // that exist from the thread's own on
  bool aligned_;
};

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LOAD_CUH_
