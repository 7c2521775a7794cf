// The abilities of the CPU at run time.

#pragma once

namespace jaxfp8 {

// Bits of `Feature`, each allowed by both the processor and the operating system.
unsigned CpuFeatures();

// Their names, for people: "avx2 avx512 avx512_vnni"; "" for none.
const char* CpuFeatureNames();

}  // namespace jaxfp8
