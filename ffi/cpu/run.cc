#include "cpu/run.h"

#include <algorithm>

#include "cpu/counters.h"
#include "cpu/features.h"
#include "cpu/gemm.h"
#include "cpu/route.h"

namespace jaxfp8 {
namespace {

// The maximum of no values is 0.
void ClearAmax(const EpilogueSpec& epilogue, void* amax) {
  int64_t count = 1;
  for (int64_t size : epilogue.amax) count *= size;
  if (amax) std::fill_n(static_cast<float*>(amax), count, 0.0f);
}

}  // namespace

std::string Run(const ScaledDotSpec& spec, const Buffers& buffers, std::string_view name,
                Pool& pool) {
  Tables tables;
  Problem problem = Canonical(spec, buffers, tables);
  const Route route = RouteTo(problem, CpuFeatures(), name);
  if (!route.kernel) return "`jaxfp8_scaled_dot`: " + route.reason;
  CutDepth(problem, route.kernel->sums);
  ClearAmax(spec.epilogue, buffers.amax);
  RunGemm(problem, *route.kernel, pool);
  CountCall(*route.kernel);
  return "";
}

}  // namespace jaxfp8
