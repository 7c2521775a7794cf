// How much scratch a call should bring.

#ifndef JAXFP8_CUDA_WORKSPACE_H_
#define JAXFP8_CUDA_WORKSPACE_H_

#include <cstddef>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

// Bytes that serve the problem best on any device and path; plans fit themselves to less.
size_t WorkspaceFor(const Problem& problem);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_WORKSPACE_H_
