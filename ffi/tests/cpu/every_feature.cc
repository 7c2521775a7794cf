// In place of cpu/features.cc where kernels run in software: nothing is lacking but what the
// software itself needs.

#include "cpu/features.h"

namespace jaxfp8 {

unsigned CpuFeatures() {
  __builtin_cpu_init();
  const bool enough = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
  return enough ? ~0u : 0;
}

const char* CpuFeatureNames() {
  return CpuFeatures() ? "avx2 avx512 avx512_vbmi avx512_vnni avx512_bf16 amx in software" : "";
}

}  // namespace jaxfp8
