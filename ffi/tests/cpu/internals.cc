#include "tests/cpu/internals.h"

#include <cstring>

#include "common/abi.h"
#include "cpu/axes.h"
#include "cpu/features.h"
#include "cpu/float_mode.h"
#include "cpu/pool.h"
#include "cpu/route.h"
#include "cpu/run.h"
#include "cpu/scratch.h"

namespace jaxfp8::tests {

std::vector<CompiledKernel> CompiledKernels() {
  std::vector<CompiledKernel> all;
  for (const Kernel* kernel : AllKernels()) {
    all.push_back({kernel->name, !(kernel->needs & ~CpuFeatures())});
  }
  return all;
}

uint64_t CallsOfKernel(int index) { return Calls::Of(index); }

std::string FeaturesHere() { return CpuFeatureNames(); }

void SoilScratch() {
  constexpr int64_t kSoiledBytes = 96 << 10;
  Scratch& scratch = Scratch::OfThread();
  scratch.Reserve(kSoiledBytes);
  std::memset(scratch.Take<uint8_t>(kSoiledBytes), 0xff, kSoiledBytes);
}

Status CallAsStored(const Case& from, const jaxfp8_scaled_dot_spec& spec,
                    const jaxfp8_scaled_dot_buffers& given, int threads) {
  Request request;
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(ReadRequest(&spec, request));
  JAXFP8_RETURN_IF_ERROR(ReadBuffers(&given, request.spec, buffers));
  request.spec.lhs.scale_rounded = from.lhs.scale_rounded;
  request.spec.rhs.scale_rounded = from.rhs.scale_rounded;
  buffers.lhs_scale_type = from.lhs.scale_type;
  buffers.rhs_scale_type = from.rhs.scale_type;
  buffers.lhs_zero_type = from.lhs.zero_type;
  buffers.rhs_zero_type = from.rhs.zero_type;
  buffers.bias_type = from.bias_dtype;
  const FloatMode mode;
  OwnThreads pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

BlockingPlan PlanOf(const char* kernel, const char* left, const char* right, int64_t batch,
                    const Sizes& sizes, int64_t threads, bool along, int64_t scaled) {
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
  const std::vector<float> ones((sizes.depth + tile - 1) / tile, 1);
  Buffers buffers{};
  spec.rhs.scale = scaled > 0;
  buffers.rhs_scale = scaled ? const_cast<float*>(ones.data()) : nullptr;
  Tables tables;
  const Axes groups = AxesOf(spec);
  const Form form = FormOf(spec, groups);
  CanonicalDot problem = Canonical(spec, groups, form, buffers, tables);
  const Route route = RouteTo(form, CpuFeatures(), kernel);
  CutDepth(problem, form, route.kernel->compute);
  return MakeBlockingPlan(problem, *route.kernel, threads);
}

}  // namespace jaxfp8::tests
