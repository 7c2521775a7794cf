// How much scratch memory a call should bring.

#ifndef JAXFP8_CUDA_WORKSPACE_H_
#define JAXFP8_CUDA_WORKSPACE_H_

#include <cstddef>
#include <string_view>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

// Bytes of workspace with which the path of the problem, or the one called `kernel`, is as fast as
// it can be on devices of a compute capability (10 * major + minor), or on any device (0). Plans
// also work with less.
size_t WorkspaceFor(const Problem& problem, std::string_view kernel, int compute_capability);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_WORKSPACE_H_
