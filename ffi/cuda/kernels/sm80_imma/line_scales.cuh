// The scale of each line of an operand, for its int8 codes:
//
//   scale = max|value * scale| / 127 over finite values; 1 if all are 0 or none is finite
//
//   K is contiguous      a block has a line. A thread takes every 128th value.
//   lines are            a block has 32 lines, a lane each. A warp takes every fourth K.
//                           |
//   shared               a maximum for each warp (and lane)

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_LINE_SCALES_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_LINE_SCALES_CUH_

#include "cuda/kernels/sm80_imma/layout.h"
#include "cuda/kernels/sm80_imma/lines.cuh"

namespace jaxfp8::cuda::imma {

inline constexpr int kLinesOfBlock = 32;
inline constexpr int kLineScaleSharedBytes = kThreads * 4;

// The largest finite magnitude of every `step`th value of a line, as bits.
template <DType kType>
JAXFP8_DEVICE uint32_t MaxOfValues(const Operand& o, int64_t batch, int line, int first, int step,
                                   int depth) {
  const Bits<kType>* from =
      static_cast<const Bits<kType>*>(o.values) + batch * o.batch + line * o.line;
  const float scale = ScaleOfLine(o, batch, line);
  uint32_t largest = 0;
#pragma unroll 4
  for (int k = first; k < depth; k += step) {
    const uint32_t bits = FiniteMagnitude(Decode<kType>(from[k * o.depth]) * scale);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <DType kType, bool kMnMajor>
JAXFP8_DEVICE void FindLineScales(const LineScaleArguments& a) {
  const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
  const BlockIndex block = ThisBlock();
  const int64_t batch = block.z;
  const int line = kMnMajor ? block.x * kLinesOfBlock + lane : block.x;
  uint32_t largest = 0;
  if (line < a.lines) {
    largest = kMnMajor
                  ? MaxOfValues<kType>(a.operand, batch, line, warp, kWarps, a.depth)
                  : MaxOfValues<kType>(a.operand, batch, line, ThreadIndex(), kThreads, a.depth);
  }
  const uint32_t shared = DynamicShared();
  StoreShared(shared + 4 * ThreadIndex(), {largest});
  SyncThreads();
  if (warp > 0) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    uint32_t other[1];
    LoadShared(shared + 4 * (32 * w + lane), other);
    largest = other[0] > largest ? other[0] : largest;
  }
  if (!kMnMajor) largest = MaxOfWarp(largest);
  if (line < a.lines && (kMnMajor || lane == 0)) {
    a.scale[batch * a.lines + line] = ScaleOf<DType::kS8>(FloatFromBits(largest));
  }
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LINE_SCALES_CUH_
