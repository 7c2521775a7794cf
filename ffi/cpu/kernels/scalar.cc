// The portable kernels: no intrinsics, for machines of any kind.

#define JAXFP8_ISA scalar

#include "cpu/kernels/float_sums.h"
#include "cpu/kernels/short_sums.h"
#include "cpu/kernels/table.h"

namespace jaxfp8::scalar {

constexpr Kernel kKernels[] = {
    Entry<ShortSums>("scalar_int8", 0, Sums::kInteger),
    Entry<FloatSums>("scalar_f32", 0, Sums::kFloat32),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::scalar
