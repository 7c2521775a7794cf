// The step of each line of an operand, and the scale of its int8 codes:
//
//   step  = max|value| / 127 over finite values; 1 if all are 0 or none is finite
//   scale = step * the scale that the values have already
//
//   K is contiguous      a block has a line. A thread takes every 128th chunk of 16 bytes,
//                        or every 128th value of lines that are not aligned.
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

JAXFP8_DEVICE uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The largest finite magnitude of every `step`th value of a line, as bits.
template <DType kType>
JAXFP8_DEVICE uint32_t MaxOfValues(const Operand& o, const Bits<kType>* line, int first, int step,
                                   int depth) {
  uint32_t largest = 0;
#pragma unroll 4
  for (int k = first; k < depth; k += step) {
    largest = Larger(largest, FiniteMagnitude(Decode<kType>(line[k * o.depth])));
  }
  return largest;
}

// The same of a thread's part of a line along which K is contiguous.
template <DType kType>
JAXFP8_DEVICE uint32_t MaxAlongDepth(const Operand& o, const Bits<kType>* line, int depth) {
  constexpr int kPerChunk = 16 / SizeOf(kType);
  const int chunks = o.aligned ? depth / kPerChunk : 0;
  uint32_t largest = 0;
#pragma unroll 2
  for (int i = ThreadIndex(); i < chunks; i += kThreads) {
    uint32_t words[4];
    LoadGlobal16(line + i * kPerChunk, words);
#pragma unroll
    for (const uint32_t word : words) {
      float values[kPerWord<kType>];
      DecodeWord<kType>(word, values);
#pragma unroll
      for (const float value : values) largest = Larger(largest, FiniteMagnitude(value));
    }
  }
  const int rest = chunks * kPerChunk + ThreadIndex();
  return Larger(largest, MaxOfValues<kType>(o, line, rest, kThreads, depth));
}

template <DType kType, bool kMnMajor>
JAXFP8_DEVICE void FindLineScales(const LineScaleArguments& a) {
  const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
  const BlockIndex block = ThisBlock();
  const int64_t batch = block.z;
  const int line = kMnMajor ? block.x * kLinesOfBlock + lane : block.x;
  uint32_t largest = 0;
  if (line < a.lines) {
    const Operand& o = a.operand;
    const auto* values =
        static_cast<const Bits<kType>*>(o.values) + batch * o.batch + line * o.line;
    largest = kMnMajor ? MaxOfValues<kType>(o, values, warp, kWarps, a.depth)
                       : MaxAlongDepth<kType>(o, values, a.depth);
  }
  const uint32_t shared = DynamicShared();
  StoreShared(shared + 4 * ThreadIndex(), {largest});
  SyncThreads();
  if (warp > 0) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    uint32_t other[1];
    LoadShared(shared + 4 * (32 * w + lane), other);
    largest = Larger(largest, other[0]);
  }
  if (!kMnMajor) largest = MaxOfWarp(largest);
  if (line < a.lines && (kMnMajor || lane == 0)) {
    const float step = ScaleOf<DType::kS8>(FloatFromBits(largest));
    a.step[batch * a.lines + line] = step;
    a.scale[batch * a.lines + line] = a.given ? step * a.given[a.tiles.At(batch, line, 0)] : step;
  }
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_LINE_SCALES_CUH_
