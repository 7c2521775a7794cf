// Which kernel takes a problem, and whether it packs the weight; results hardly show either.

#include <algorithm>

#include "tests/cpu/call.h"
#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"
#include "tests/cpu/internals.h"

namespace jaxfp8::tests {

CLAIM(PortableKernelsForFloatsAndForIntegersAreCompiledIn) {
  harness.Begin("names");
  const Options& options = harness.options();
  if (!options.kernels.empty() || !options.without.empty()) return;
  harness.Expect(harness.Has("scalar_f32"), "scalar_f32 is missing");
  harness.Expect(harness.Has("scalar_int8"), "scalar_int8 is missing");
}

CLAIM(TilesOfAmxLeaveFewRowsToOtherKernels) {
  constexpr struct {
    DType lhs, rhs;
    int layout;
    int64_t rows, depth;
    const char* kernel;
  } kRoutes[] = {
      {DType::kBF16, DType::kE4M3, kAcross, 2, 512, "avx512_vbmi"},
      {DType::kBF16, DType::kE4M3, kAcross, 3, 512, "amx_bf16"},
      {DType::kBF16, DType::kS8, kAlong, 1, 512, "avx512_vbmi"},
      {DType::kBF16, DType::kS8, kAlong, 2, 512, "amx_bf16"},
      {DType::kBF16, DType::kS8, kAlong, 2, 40, "avx512_vbmi"},
      {DType::kS8, DType::kS8, kAlong, 4, 512, "avx512_vnni"},
      {DType::kS8, DType::kS8, kAlong, 5, 512, "amx_int8"},
  };
  for (const auto& route : kRoutes) {
    const Case of = Matrices(route.lhs, route.rhs, {route.rows, route.depth, 70}, route.layout);
    if (!harness.Begin(of.Text())) continue;
    if (!harness.Has("amx_bf16") || !harness.Has("avx512_vnni")) continue;
    const std::string kernel = RouteOf(of);
    harness.Expect(kernel == route.kernel,
                   of.Text() + " is computed by " + kernel + ", but needs " + route.kernel);
  }
}

// Up to how many rows the tiles of AMX multiply a weight as it lies in memory.
CLAIM(TilesOfAmxPackTheWeightForManyRowsOnly) {
  const auto expect = [&](const std::string& kernel, const Sizes& sizes, bool along, bool gemv,
                          int64_t scaled = 0) {
    if (!harness.Begin(kernel + ", " + std::to_string(sizes.rows) + " rows, " +
                       (along ? "[N, K], " : "[K, N], ") + std::to_string(sizes.depth) +
                       " deep, scaled by " + std::to_string(scaled))) {
      return;
    }
    if (!harness.Has(kernel)) return;
    const bool bf16 = kernel == "amx_bf16";
    const BlockingPlan plan = PlanOf(kernel.c_str(), bf16 ? "bfloat16" : "int8",
                                     bf16 ? "float8_e4m3fn" : "int8", 1, sizes, 1, along, scaled);
    harness.Expect(plan.gemv == gemv, gemv ? "is packed" : "is not packed");
  };
  expect("amx_bf16", {8, 512, 256}, false, true);
  expect("amx_bf16", {9, 512, 256}, false, false);
  expect("amx_int8", {5, 512, 256}, false, false);
  constexpr struct {
    int64_t depth, scaled, most;
  } kAlongTheDepth[] = {{16, 0, 32},    {512, 0, 128},   {4096, 0, 128},   {57344, 0, 128},
                        {4096, 64, 64}, {4096, 100, 99}, {4096, 128, 128}, {4096, 512, 128}};
  for (const auto& [depth, scaled, most] : kAlongTheDepth) {
    for (const int more : {0, 1}) {
      for (const char* kernel : {"amx_bf16", "amx_int8"}) {
        expect(kernel, {most + more, depth, 256}, true, !more, scaled);
      }
    }
  }
}

}  // namespace jaxfp8::tests
