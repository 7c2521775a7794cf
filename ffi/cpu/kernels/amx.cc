// The kernels for x86 with AMX, whose instructions multiply tiles.

#define JAXFP8_ISA amx
#define JAXFP8_VBMI

#include "cpu/kernels/bf16_sums.h"
#include "cpu/kernels/byte_sums.h"
#include "cpu/kernels/table.h"
#include "cpu/kernels/tiles.h"

namespace jaxfp8::amx {

constexpr unsigned kNeeds = kAvx512 | kAvx512Vbmi | kAvx512Vnni | kAvx512Bf16 | kAmx;

constexpr Kernel kKernels[] = {
    TileEntry<SignedByteSums>("amx_int8", kNeeds, Sums::kInteger),
    TileEntry<BF16Sums>("amx_bf16", kNeeds, Sums::kBFloat16),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::amx
