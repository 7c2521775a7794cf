// The kernel for x86 with AVX-512 and its 8-bit dot products.

#define JAXFP8_ISA avx512_vnni

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/int8_quads.h"

namespace jaxfp8::avx512_vnni {

constexpr Kernel kKernels[] = {
    Entry<Int8Quads>("avx512_vnni", kAvx512 | kAvx512Vnni, ComputeType::kInt32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx512_vnni
