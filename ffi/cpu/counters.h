// The calls of each kernel: they reveal a reference kernel in a fast one's place.

#ifndef JAXFP8_CPU_COUNTERS_H_
#define JAXFP8_CPU_COUNTERS_H_

#include <cstdint>

#include "cpu/kernels/kernel.h"

namespace jaxfp8 {

void CountCall(const Kernel& kernel);
uint64_t CallsOf(int kernel);  // by index in AllKernels()
void ResetCalls();

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_COUNTERS_H_
