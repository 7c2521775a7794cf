// What checks need of the library beyond its C interface, all of it in one place.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "cpu/plan.h"
#include "include/jaxfp8/jaxfp8.h"
#include "tests/cpu/case.h"
#include "tests/cpu/draw.h"

namespace jaxfp8::tests {

struct CompiledKernel {
  std::string name;
  bool runs_here;
};

// The kernels compiled in, whose index counts their calls; and what this CPU has.
std::vector<CompiledKernel> CompiledKernels();
uint64_t CallsOfKernel(int index);
std::string FeaturesHere();

// Overwrites the calling thread's scratch memory with bytes that are NaN, or 255.
void SoilScratch();

// Computes a case with scales, zero points or a bias of a dtype that only XLA's call takes.
Status CallAsStored(const Case& from, const jaxfp8_scaled_dot_spec& spec,
                    const jaxfp8_scaled_dot_buffers& buffers, int threads);

// How the kernel of that name, or the one that a call takes, cuts a batch of products. The weight
// is [N, K] if `along`, else [K, N]. With `scaled`, each stretch of so much depth has a scale of 1.
BlockingPlan PlanOf(const char* kernel, const char* left, const char* right, int64_t batch,
                    const Sizes& sizes, int64_t threads, bool along = false, int64_t scaled = 0);

}  // namespace jaxfp8::tests
