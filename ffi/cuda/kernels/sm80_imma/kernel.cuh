// The kernels of `sm80_imma` as nvcc compiles them, and which instance a product needs.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_KERNEL_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_KERNEL_CUH_

#include "cuda/kernels/sm80_imma/mainloop.cuh"

namespace jaxfp8::cuda::imma {

template <DType kActivation, Dataflow kFlow, DType kWeight, bool kMnMajor, int kRowFragments>
__global__ void __launch_bounds__(kThreads) Sm80Imma(const __grid_constant__ Arguments a) {
  static_assert(SharedBytes(SizeOf(kActivation), kRowFragments) ==
                kSharedBytes<Activations<kActivation, kFlow, kRowFragments>>);
  MultiplyTile<kActivation, kFlow, kWeight, kMnMajor, kRowFragments>(a);
}

// A warp that has one fragment of rows rounds 16-bit values itself: four warps repeat little work,
// and there is no second pass through shared memory. With four fragments the block rounds them
// once.
template <DType kActivation, DType kWeight, bool kMnMajor>
KernelFunction ForRows(int row_fragments) {
  constexpr bool kCodes = SizeOf(kActivation) == 1;
  constexpr Dataflow kFew = kCodes ? Dataflow::kCodes : Dataflow::kRegisters;
  constexpr Dataflow kMany = kCodes ? Dataflow::kCodes : Dataflow::kShared;
  return row_fragments == 1 ? Sm80Imma<kActivation, kFew, kWeight, kMnMajor, 1>
                            : Sm80Imma<kActivation, kMany, kWeight, kMnMajor, 4>;
}

template <DType kWeight>
KernelFunction KernelFor(DType activation, bool mn_major, int row_fragments) {
  return Visit<DType::kS8, DType::kE4M3, DType::kBF16, DType::kF16>(
      activation, KernelFunction{nullptr}, [&]<DType kActivation>() {
        return mn_major ? ForRows<kActivation, kWeight, true>(row_fragments)
                        : ForRows<kActivation, kWeight, false>(row_fragments);
      });
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_KERNEL_CUH_
