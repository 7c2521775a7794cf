// How a product is cut for a kernel.

#ifndef JAXFP8_TESTS_CPU_PLAN_OF_H_
#define JAXFP8_TESTS_CPU_PLAN_OF_H_

#include <vector>

#include "cpu/axes.h"
#include "cpu/features.h"
#include "cpu/plan.h"
#include "cpu/route.h"
#include "tests/cpu/draw.h"

namespace jaxfp8::tests {

// Of a batch of matrices, columns side by side or `along` the depth, by the kernel of that name, or
// by the one that a call takes. Scales are 1, for each so much depth of all columns, or none.
inline Plan PlanOf(const char* kernel, const char* left, const char* right, int64_t batch,
                   const Sizes& sizes, int64_t threads, bool along = false, int64_t scaled = 0) {
  const int64_t lhs[] = {batch, sizes.rows, sizes.depth};
  const int64_t rhs[] = {batch, along ? sizes.columns : sizes.depth,
                         along ? sizes.depth : sizes.columns};
  const int64_t tile = scaled ? scaled : sizes.depth;
  const int64_t tiles[] = {batch, along ? sizes.columns : tile, along ? tile : sizes.columns};
  const int64_t axes[] = {0, 1, 2};
  ScaledDotSpec spec;
  spec.lhs = {left, lhs, Dims(axes + 2, 1), Dims(axes, 1), lhs};
  spec.rhs = {right, rhs, Dims(axes + (along ? 2 : 1), 1), Dims(axes, 1), tiles};
  spec.epilogue.activation = "none";
  spec.epilogue.out_dtype = "float32";
  std::vector<float> ones((sizes.depth + tile - 1) / tile, 1);
  Buffers buffers{};
  spec.rhs.scale = scaled > 0;
  buffers.rhs_scale = scaled ? ones.data() : nullptr;
  Tables tables;
  const Axes groups = AxesOf(spec);
  const Form form = FormOf(spec, groups);
  Problem problem = Canonical(spec, groups, form, buffers, tables);
  const Route route = RouteTo(form, CpuFeatures(), kernel);
  CutDepth(problem, form, route.kernel->compute);
  return MakePlan(problem, *route.kernel, threads);
}

}  // namespace jaxfp8::tests

#endif  // JAXFP8_TESTS_CPU_PLAN_OF_H_
