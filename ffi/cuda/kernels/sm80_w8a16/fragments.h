// From a stage of `sm80_w8a16` in shared memory to the fragments of the tensor core instruction.
//
// Runs on the host too, where a test multiplies a tile by it.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_FRAGMENTS_H_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_FRAGMENTS_H_

#include <cstdint>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/sm80_w8a16/layout.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

struct alignas(16) Vector16 {
  uint32_t words[4];
};

// What a lane knows of its four columns over a stretch of the depth.
struct Columns {
  float scale[4];
  uint32_t less[4];  // of `Decoder::LessOf`
};

// Sums of a warp: of[m][n] are those of fragment m of its columns and n of the rows.
template <int kEights>
struct Sums {
  float of[2][kEights][4];
};

// The codes of a lane in four steps: of[step][i] are four depths of its column i, or its four
// columns at depth i.
struct Codes {
  uint32_t of[4][4];
};

// `half` of the depth of a stage.
template <bool kDepthMajor>
JAXFP8_HD Codes LoadCodes(const uint8_t* weights, int thread, int half) {
  const int lane = thread % 32, column = ColumnOf(thread / 32, lane);
  Codes codes;
  for (int j = 0; j < 4; ++j) {
    if constexpr (kDepthMajor) {
      for (int i = 0; i < 4; ++i) {
        const int offset =
            DepthLineOffset(DepthOf(lane, 4 * half + j) + i, column / 16) + column % 16;
        codes.of[j][i] = *reinterpret_cast<const uint32_t*>(weights + offset);
      }
    } else {
      const int offset = ColumnLineOffset(column + j, DepthOf(lane, 4 * half) / 16);
      const Vector16 run = *reinterpret_cast<const Vector16*>(weights + offset);
      for (int i = 0; i < 4; ++i) codes.of[i][j] = run.words[i];
    }
  }
  return codes;
}

// The activations of a lane for steps 2 * pair and 2 * pair + 1, two words each.
JAXFP8_HD Vector16 LoadTwoSteps(const uint8_t* activations, int lane, int eight, int pair) {
  const int offset = ActivationOffset(ActivationRowOf(lane, eight), DepthOf(lane, 2 * pair) / 8);
  return *reinterpret_cast<const Vector16*>(activations + offset);
}

// The two fragments of weights of one step: fragments[m][2 * pair + h] is column 2 * m + h of the
// lane at depths 2 * pair and 2 * pair + 1.
template <class D, bool kDepthMajor, bool kCareful>
JAXFP8_HD void DecodeStep(const uint32_t (&codes)[4], const Columns& columns, uint32_t flip,
                          uint32_t (&fragments)[2][4]) {
  for (int i = 0; i < 4; ++i) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t picked = kDepthMajor
                                  ? PickBytes(codes[2 * pair], codes[2 * pair + 1], PickColumn(i))
                                  : PickBytes(codes[i], 0, PickDepths(pair));
      fragments[i / 2][2 * pair + i % 2] =
          D::template Decode<kCareful>(picked, flip, D::kInteger ? columns.less[i] : 0);
    }
  }
}

#ifdef __CUDACC__
// Whether some lane of the warp has a code that is infinity or NaN and would not be right.
template <class D>
__device__ __forceinline__ bool AnyOfWarpUnusual(const Codes& codes) {
  if constexpr (!D::kPoisons && !D::kMends) return false;
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) any |= D::Unusual(codes.of[i / 4][i % 4]);
  return __any_sync(0xffffffffu, any & 0x80808080u);
}
#endif

// Fragments that are NaN in the columns of a lane where some of its codes are, and 0 elsewhere.
template <class D, bool kDepthMajor>
JAXFP8_HD void PoisonOf(const Codes& codes, uint32_t (&fragments)[2][4]) {
  for (int i = 0; i < 4; ++i) {
    uint32_t any = 0;
    for (int step = 0; step < 4; ++step) {
      for (int d = 0; d < (kDepthMajor ? 4 : 1); ++d) {
        any |= D::IsNaN(codes.of[step][kDepthMajor ? d : i]);
      }
    }
    if (kDepthMajor) any &= 0xffu << (8 * i);
    fragments[i / 2][i % 2] = any ? 0x7fff7fffu : 0;  // in both wide types
    fragments[i / 2][2 + i % 2] = 0;
  }
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_FRAGMENTS_H_
