// A stage of `sm80_w8a16` multiplied by four warps together, on sm_90a.
//
// The instruction of a warpgroup takes decoded weights from registers, in the very fragments of the
// older one, and the activations from shared memory: no warp loads them, and the tensor cores run at
// their full rate. It wants eight rows of eight depths side by side there, and in the order in which
// the lanes hold the weights: `PackActivations` puts them so beforehand.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_TOGETHER_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_TOGETHER_CUH_

#include "cuda/kernels/sm80_w8a16_fragments.h"
#include "cuda/kernels/sm80_w8a16_plan.h"
#include "cuda/kernels/wgmma.cuh"

namespace jaxfp8::cuda::w8a16 {

// Two steps of a group at a time: while the tensor cores work on them the next two are decoded.
template <class D, DType kWide, bool kDepthMajor, int kEights>
__device__ __forceinline__ void MultiplyStageTogether(const uint8_t* stage,
                                                      const AllColumns<kEights>& columns,
                                                      uint32_t flip, Sums<kEights>& sums) {
  constexpr int kGroups = GroupsFor(kEights);
  const uint32_t activations = SharedAddress(stage + kGroups * kGroupBytes);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Codes codes = LoadCodes<kDepthMajor>(stage + g * kGroupBytes, threadIdx.x, half);
      const bool unusual =
          (D::kPoisons || D::kMends) && __any_sync(0xffffffffu, AnyUnusual<D>(codes));
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        uint32_t fragments[2][2][4];
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          DecodeStep<D, kDepthMajor>(codes.of[2 * two + one], columns.of[g], flip, fragments[one]);
        }
        if (unusual) {
          if constexpr (D::kMends) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              fragments[i / 8][i / 4 % 2][i % 4] = D::Mend(fragments[i / 8][i / 4 % 2][i % 4]);
            }
          } else if constexpr (D::kPoisons) {
            uint32_t poison[2][4];
            PoisonOf<D, kDepthMajor>(codes, poison);
#pragma unroll
            for (int i = 0; i < 8; ++i) fragments[0][i / 4][i % 4] |= poison[i / 4][i % 4];
          }
        }
        FenceWarpgroup();
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          const int step = 4 * half + 2 * two + one;
          const uint64_t matrix = MatrixAt(activations + step * PackedStepBytes(kEights),
                                           PackedStepBytes(kEights) / 2, 128);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            WarpgroupMma<kWide, kEights>(sums.of[g][m], fragments[one][m], matrix);
          }
        }
        CommitWarpgroup();
        WaitForWarpgroup<1>();
      }
    }
  }
  WaitForWarpgroup<0>();
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_TOGETHER_CUH_
