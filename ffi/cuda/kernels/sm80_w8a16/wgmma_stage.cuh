// A stage of `sm80_w8a16` multiplied by four warps together, on sm_90a.
//
// The instruction of a warpgroup takes decoded weights from registers, in the very fragments of the
// older one, and the activations from shared memory: no warp loads them, and the tensor cores run
// at their full rate. It wants eight rows of eight depths side by side there, and in the order in
// which the lanes hold the weights: `PackActivations` puts them so beforehand.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_WGMMA_STAGE_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_WGMMA_STAGE_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

template <class D, bool kDepthMajor, bool kCareful>
__device__ __forceinline__ void DecodeTwoSteps(const Codes& codes, int two, const Columns& columns,
                                               uint32_t flip, uint32_t (&fragments)[2][2][4]) {
#pragma unroll
  for (int one = 0; one < 2; ++one) {
    DecodeStep<D, kDepthMajor, kCareful>(codes.of[2 * two + one], columns, flip, fragments[one]);
  }
}

// NaN to the fragments of the columns in which the lane has a code that is NaN.
template <class D, bool kDepthMajor>
__device__ __forceinline__ void Spoil(const Codes& codes, uint32_t (&fragments)[2][4]) {
  uint32_t poison[2][4];
  PoisonOf<D, kDepthMajor>(codes, poison);
#pragma unroll
  for (int i = 0; i < 8; ++i) fragments[i / 4][i % 4] |= poison[i / 4][i % 4];
}

// Two steps at a time: while the tensor cores work on them the next two are decoded.
template <class D, DType kWide, bool kDepthMajor, int kEights>
__device__ __forceinline__ void MultiplyStageTogether(const Arguments& a, const uint8_t* stage,
                                                      const Columns& columns, Sums<kEights>& sums) {
  const uint32_t activations = SharedAddress(stage + kWeightBytes);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kDepthMajor>(stage, threadIdx.x, half);
    const bool unusual = AnyOfWarpUnusual<D>(codes);
    const bool careful = (D::kMends && unusual) || (D::kSubtracts && a.subtracts);
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      uint32_t fragments[2][2][4];
      if (careful) {
        DecodeTwoSteps<D, kDepthMajor, true>(codes, two, columns, a.flip, fragments);
      } else {
        DecodeTwoSteps<D, kDepthMajor, false>(codes, two, columns, a.flip, fragments);
      }
      if constexpr (D::kPoisons) {
        if (unusual) Spoil<D, kDepthMajor>(codes, fragments[0]);
      }
      // Here, not between the instructions that read them, which would have to wait again.
#pragma unroll
      for (int i = 0; i < 16; ++i) KeepInRegister(fragments[i / 8][i / 4 % 2][i % 4]);
      FenceWarpgroup();
#pragma unroll
      for (int one = 0; one < 2; ++one) {
        const int step = 4 * half + 2 * two + one;
        const uint64_t matrix = MatrixAt(activations + step * PackedStepBytes(kEights),
                                         PackedStepBytes(kEights) / 2, 128);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          WarpgroupMma<kWide, kEights>(sums.of[m], fragments[one][m], matrix);
        }
      }
      CommitWarpgroup();
      WaitForWarpgroup<1>();
    }
  }
  WaitForWarpgroup<0>();
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_WGMMA_STAGE_CUH_
