// Path "general": every canonical problem, in one kernel without tensor cores.

#pragma once

#include <memory>

#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {

inline constexpr int kGeneralTile = 64;  // rows and columns of a block's output tile

// Why the kernel cannot compute a problem. In a file without device code, so that
// routes compile without nvcc.
Status GeneralWhyNot(const Problem& problem, const Device& device);

// A plan that needs no workspace.
Status PlanGeneral(const Problem& problem, const Device& device, size_t workspace,
                   std::unique_ptr<Plan>& plan);

// Launches the kernel.
Status LaunchGeneral(const Problem& problem, const Buffers& buffers, cudaStream_t stream);

}  // namespace jaxfp8::cuda
