// The kernels of one instruction set, best first. CMake compiles this file once for each of
// `JAXFP8_ISAS`, with JAXFP8_ISA as its name and JAXFP8_IS_name defined.

#pragma once

#if defined(JAXFP8_IS_amx) || defined(JAXFP8_IS_avx512_vbmi) || defined(JAXFP8_IS_avx512_bf16)
#define JAXFP8_VBMI
#endif
#if defined(JAXFP8_IS_amx)
#define JAXFP8_AMX
#include "cpu/kernels/amx/entry.h"
#endif
#include "cpu/kernels/isa/entry.h"
#if defined(JAXFP8_IS_amx) || defined(JAXFP8_IS_avx512_bf16)
#include "cpu/kernels/policy/bf16_pairs.h"
#endif
#if defined(JAXFP8_IS_amx) || defined(JAXFP8_IS_avx512_vnni)
#include "cpu/kernels/policy/int8_quads.h"
#endif
#include "cpu/kernels/policy/float32.h"
#include "cpu/kernels/policy/int16_pairs.h"

namespace jaxfp8::JAXFP8_ISA {

constexpr Kernel kKernels[] = {
#if defined(JAXFP8_IS_amx)
    TileEntry<SignedInt8Quads>("amx_int8", ComputeType::kInt32),
    TileEntry<Bf16Pairs>("amx_bf16", ComputeType::kBFloat16),
#elif defined(JAXFP8_IS_avx512_vnni)
    Entry<Int8Quads>("avx512_vnni", kAvx512 | kAvx512Vnni, ComputeType::kInt32),
#elif defined(JAXFP8_IS_avx512_bf16)
    Entry<Bf16Pairs>("avx512_bf16", kAvx512 | kAvx512Vbmi | kAvx512Bf16, ComputeType::kBFloat16),
#elif defined(JAXFP8_IS_avx512_vbmi)
    Entry<Float32>("avx512_vbmi", kAvx512 | kAvx512Vbmi, ComputeType::kFloat32),
#elif defined(JAXFP8_IS_avx512)
    Entry<Int16Pairs>("avx512_int8", kAvx512, ComputeType::kInt32),
    Entry<Float32>("avx512_f32", kAvx512, ComputeType::kFloat32),
#elif defined(JAXFP8_IS_avx2)
    Entry<Int16Pairs>("avx2_int8", kAvx2, ComputeType::kInt32),
    Entry<Float32>("avx2_f32", kAvx2, ComputeType::kFloat32),
#else
    Entry<Int16Pairs>("scalar_int8", 0, ComputeType::kInt32),
    Entry<Float32>("scalar_f32", 0, ComputeType::kFloat32),
#endif
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::JAXFP8_ISA
