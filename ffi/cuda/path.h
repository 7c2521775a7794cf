// A path: one way to compute a problem on a GPU.
//
//   handler.cc (known_calls.h), abi.cc -> plans.h: is there a plan? -> route.h: which path can?
//                                                         |  Path::why_not   pure
//                          Plan::Run  <-------------------+  Path::make_plan once per problem
//
// To add a path, say sm100_gemm:
//   1. kernels/sm100_gemm/. `path.cu` defines `const Path kSm100Gemm`, its plan and launches. What
//      needs no nvcc (why_not, sizes, schedules) is a .cc file, so that routes are tested without a
//      GPU. Kernels include kernels/common/ and kernels/epilogue/ and neither XLA nor Python. Each
//      .cuh begins with a picture of where its operands lie.
//   2. cuda/CMakeLists.txt: the sources, and the instances of templates.
//      ffi/tests/cuda/CMakeLists.txt: the .cc files (`host`).
//   3. A row of `JAXFP8_CUDA_PATHS` below, and its place in `InOrder` of route.cc.
//   4. workspace.cc: how much scratch it can use.
//   5. Tests: ffi/tests/*_test.cc for the host side and a stand-in for the plan in
//      ffi/tests/cuda/runtime_stand_ins.h, so that the fuzzer plans it;
//      tests/native/test_cuda_route.py for its place among the routes; tests/gpu/test_products.py
//      for the values, on a GPU, with how exactly it accumulates in `ACCUMULATION` of
//      tests/gpu/products.py, and a row in tests/gpu/sanitized.py; its name in
//      ffi/tests/cuda/fuzz_test.cc; its scratch in tests/test_workspace.py.
//   6. Rows of `python -m jaxfp8 bench --platform cuda`: jaxfp8/_bench/.
//   7. README.md (what runs where), docs/hardware.md, docs/custom_call.md (names of kernels),
//      CHANGELOG.md.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "common/status.h"
#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// A problem made ready for one device. Made once, and run many times, from several threads and
// streams at once.
class Plan {
 public:
  virtual ~Plan() = default;
  // Enqueues the work. Neither allocates nor waits.
  virtual Status Run(const Buffers& buffers, cudaStream_t stream) const = 0;
};

struct Path {
  const char* name;
  // Why the path cannot compute the problem on the device. Pure.
  Status (*why_not)(const Problem&, const Device&);
  // Makes a plan that needs at most `workspace` bytes.
  Status (*make_plan)(const Problem&, const Device&, size_t workspace, std::unique_ptr<Plan>& plan);
  // Whether it reads scales of 16 bits, exponents, and such as it rounds (`Side::scale_type`).
  // Other paths are not asked for problems that have them.
  bool reads_any_scale = false;
  // Whether it reads 8-bit sides whose batch has jumps (problem.h). Others are not asked for them.
  bool reads_batch_jumps = false;
  // Whether it takes groups (`Grouping`). Others are not asked for them.
  bool takes_groups = false;
};

// Every path by symbol and name, in the order of their counters. tests/native/test_lists.py holds
// definitions and documents against it.
#define JAXFP8_CUDA_PATHS(V)        \
  V(kCublasLtFp8, "cublaslt_fp8")   \
  V(kSm90Gemm, "sm90_gemm")         \
  V(kCublasLtInt8, "cublaslt_int8") \
  V(kSm80W8A16, "sm80_w8a16")       \
  V(kDecodedW8A16, "decoded_w8a16") \
  V(kCublasLtWide, "cublaslt_wide") \
  V(kGeneral, "general")            \
  V(kSm80Imma, "sm80_imma")

#define JAXFP8_DECLARE(symbol, name) extern const Path symbol;
JAXFP8_CUDA_PATHS(JAXFP8_DECLARE)
#undef JAXFP8_DECLARE

// Why scratch of so many bytes does not do.
inline Status WhyNotWorkspace(size_t bytes, size_t needed) {
  if (bytes >= needed) return {};
  return "its workspace has " + std::to_string(bytes) + " bytes, but it needs " +
         std::to_string(needed);
}

// "`what` failed: cudaErrorInvalidValue (invalid argument)", or success.
inline Status CudaError(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return {};
  return "`" + std::string(what) + "` failed: " + cudaGetErrorName(status) + " (" +
         cudaGetErrorString(status) + ")";
}

}  // namespace jaxfp8::cuda
