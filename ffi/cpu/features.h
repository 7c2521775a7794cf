// What the CPU at hand can do.

#ifndef JAXFP8_CPU_FEATURES_H_
#define JAXFP8_CPU_FEATURES_H_

namespace jaxfp8 {

// Bits of `Feature`, as the processor and the operating system both allow.
unsigned CpuFeatures();

// Their names, for people: "avx2 avx512 avx512_vnni"; "" where there are none.
const char* CpuFeatureNames();

// Whether an L1 is so small, 32 KB of 8 ways, that what is asked for ahead of time drives out what
// is in use. Of AMD's processors (before Zen 5); what others like was measured on none.
bool HasSmallL1();

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_FEATURES_H_
