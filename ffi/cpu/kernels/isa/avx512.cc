// The kernels for x86 with the common core of AVX-512.

#define JAXFP8_ISA avx512

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/float32.h"
#include "cpu/kernels/policy/int16_pairs.h"

namespace jaxfp8::avx512 {

constexpr Kernel kKernels[] = {
    Entry<Int16Pairs>("avx512_int8", kAvx512, ComputeType::kInt32),
    Entry<Float32>("avx512_f32", kAvx512, ComputeType::kFloat32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx512
