// The abilities of the CPU at run time.

#ifndef JAXFP8_CPU_FEATURES_H_
#define JAXFP8_CPU_FEATURES_H_

namespace jaxfp8 {

// Bits of `Feature`, each allowed by both the processor and the operating system.
unsigned CpuFeatures();

// Their names, for people: "avx2 avx512 avx512_vnni"; "" for none.
const char* CpuFeatureNames();

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_FEATURES_H_
