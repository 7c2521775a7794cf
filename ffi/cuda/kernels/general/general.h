// Path "general": every canonical problem, in one kernel without tensor cores.

#ifndef JAXFP8_CUDA_KERNELS_GENERAL_GENERAL_H_
#define JAXFP8_CUDA_KERNELS_GENERAL_GENERAL_H_

#include <memory>
#include <string>

#include "cuda/path.h"

namespace jaxfp8::cuda {

inline constexpr int kGeneralTile = 64;  // outputs of a block, either way

// "" from compute capability 8.0 on, for as many outputs as a launch makes. Without nvcc.
std::string GeneralWhyNot(const Problem& problem, const Device& device);

// Needs no workspace.
std::unique_ptr<Plan> PlanGeneral(const Problem& problem, const Device& device, size_t workspace,
                                  std::string& wrong);

// {"general", GeneralWhyNot, PlanGeneral} is the path's row in the table of routes.
std::string LaunchGeneral(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GENERAL_GENERAL_H_
