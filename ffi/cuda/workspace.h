// How much scratch a call should bring.

#ifndef JAXFP8_CUDA_WORKSPACE_H_
#define JAXFP8_CUDA_WORKSPACE_H_

#include <cstddef>
#include <string_view>

#include "cuda/problem.h"

namespace jaxfp8::cuda {

// Bytes beyond which the path that takes the problem, or the one called `kernel`, is no faster on
// any device. Plans fit themselves to less. jaxfp8/_call/workspace.py has the same rule.
size_t WorkspaceFor(const Problem& problem, std::string_view kernel);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_WORKSPACE_H_
