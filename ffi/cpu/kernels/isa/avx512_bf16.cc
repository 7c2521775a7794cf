// The kernel for x86 with AVX-512, its bfloat16 dot products and its permutations of bytes.

#define JAXFP8_ISA avx512_bf16
#define JAXFP8_VBMI

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/bf16_pairs.h"

namespace jaxfp8::avx512_bf16 {

constexpr Kernel kKernels[] = {
    Entry<Bf16Pairs>("avx512_bf16", kAvx512 | kAvx512Vbmi | kAvx512Bf16, ComputeType::kBFloat16),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx512_bf16
