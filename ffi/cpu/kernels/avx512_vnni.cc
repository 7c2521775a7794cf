// The kernel for x86 with AVX-512 and its 8-bit dot products.

#define JAXFP8_ISA avx512_vnni

#include "cpu/kernels/byte_sums.h"
#include "cpu/kernels/table.h"

namespace jaxfp8::avx512_vnni {

constexpr Kernel kKernels[] = {
    Entry<ByteSums>("avx512_vnni", kAvx512 | kAvx512Vnni, Sums::kInteger),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx512_vnni
