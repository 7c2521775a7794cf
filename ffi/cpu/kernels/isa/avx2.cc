// The kernels for x86 with AVX2, FMA and F16C.

#define JAXFP8_ISA avx2

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/float32.h"
#include "cpu/kernels/policy/int16_pairs.h"

namespace jaxfp8::avx2 {

constexpr Kernel kKernels[] = {
    Entry<Int16Pairs>("avx2_int8", kAvx2, ComputeType::kInt32),
    Entry<Float32>("avx2_f32", kAvx2, ComputeType::kFloat32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::avx2
