// How many calls each path has computed, so that an unexpected fallback is visible.

#ifndef JAXFP8_CUDA_COUNTERS_H_
#define JAXFP8_CUDA_COUNTERS_H_

#include <cstdint>

#include "cuda/path.h"

namespace jaxfp8::cuda {

void CountCall(const Path& path);
uint64_t CallsOf(int path);  // by index in AllPaths()
void ResetCalls();

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COUNTERS_H_
