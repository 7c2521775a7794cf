// The XLA FFI handler `jaxfp8_scaled_dot`, and the library's account of itself and its kernels.

#include <cstdint>

#include "common/check.h"
#include "common/xla_call.h"
#include "cpu/features.h"
#include "cpu/float_mode.h"
#include "cpu/route.h"
#include "cpu/run.h"
#include "cpu/xla_pool.h"
#include "include/jaxfp8_cpu.h"

namespace jaxfp8 {
namespace {

Status Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attributes) {
  const FloatMode mode;
  Request request;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, request));
  JAXFP8_RETURN_IF_ERROR(CheckSpec(request.spec));
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(
      BindBuffers(request.spec, Describe(args), Describe(rets), Accepts::kAsStored, buffers));
  XlaPool pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" {

JAXFP8_LIBRARY_FUNCTIONS(cpu, jaxfp8::Calls)

const char* jaxfp8_cpu_features() { return jaxfp8::CpuFeatureNames(); }

int jaxfp8_cpu_kernel_available(int kernel) {
  if (!jaxfp8::Calls::InRange(kernel)) return 0;
  return !(jaxfp8::AllKernels()[kernel]->needs & ~jaxfp8::CpuFeatures());
}

}  // extern "C"

#pragma GCC visibility pop

JAXFP8_CPU_HANDLER(jaxfp8_scaled_dot, jaxfp8::Compute);
