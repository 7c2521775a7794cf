// The portable kernels: no intrinsics, for machines of any kind.

#define JAXFP8_ISA scalar

#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/float32.h"
#include "cpu/kernels/policy/int16_pairs.h"

namespace jaxfp8::scalar {

constexpr Kernel kKernels[] = {
    Entry<Int16Pairs>("scalar_int8", 0, ComputeType::kInt32),
    Entry<Float32>("scalar_f32", 0, ComputeType::kFloat32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::scalar
