#include "cpu/run.h"

#include <algorithm>

#include "common/sizes.h"
#include "cpu/axes.h"
#include "cpu/features.h"
#include "cpu/route.h"

namespace jaxfp8 {
namespace {

// The maximum of no values is 0.
void ClearAmax(const EpilogueSpec& epilogue, void* amax) {
  if (amax) std::fill_n(static_cast<float*>(amax), CountOf(epilogue.amax), 0.0f);
}

}  // namespace

// Without outputs the data is not looked at: an empty array may have any other axes.
Status Run(const ScaledDotSpec& spec, const Buffers& buffers, std::string_view name, Pool& pool) {
  const Axes axes = AxesOf(spec);
  Form form = FormOf(spec, axes);
  const bool empty = form.batch == 0 || form.rows == 0 || form.columns == 0;
  Tables tables;
  CanonicalDot problem;
  if (!empty) {
    problem = Canonical(spec, axes, form, buffers, tables);
    if (AsksForScales(form)) form.moderate_scales = HasModerateScales(problem);
  }
  const Route route = RouteTo(form, CpuFeatures(), name);
  if (!route.kernel) return route.reason;
  ClearAmax(spec.epilogue, buffers.amax);
  if (!empty) {
    CutDepth(problem, form, route.kernel->compute);
    RunGemm(problem, *route.kernel, pool);
  }
  Calls::Count(*route.kernel);
  return {};
}

}  // namespace jaxfp8
