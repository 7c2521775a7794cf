// What the CPU at hand can do.

#ifndef JAXFP8_CPU_FEATURES_H_
#define JAXFP8_CPU_FEATURES_H_

namespace jaxfp8 {

// Bits of `Feature`, as the processor and the operating system both allow.
unsigned CpuFeatures();

// Their names, for people: "avx2 avx512 avx512_vnni"; "" where there are none.
const char* CpuFeatureNames();

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_FEATURES_H_
