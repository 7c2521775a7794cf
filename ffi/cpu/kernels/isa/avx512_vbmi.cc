// The kernel for x86 with AVX-512 and its permutations of bytes.

#define JAXFP8_ISA avx512_vbmi
#define JAXFP8_VBMI

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/float32.h"

namespace jaxfp8::avx512_vbmi {

constexpr Kernel kKernels[] = {
    Entry<Float32>("avx512_vbmi", kAvx512 | kAvx512Vbmi, ComputeType::kFloat32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx512_vbmi
