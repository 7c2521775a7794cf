// The XLA FFI handler `jaxfp8_scaled_dot`, and the library's account of itself and its kernels.

#include <cstdint>

#include "common/check.h"
#include "common/xla_call.h"
#include "cpu/counters.h"
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
  Request request;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, request));
  JAXFP8_RETURN_IF_ERROR(CheckSpec(request.spec));
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(
      BindBuffers(request.spec, Describe(args), Describe(rets), Accepts::kAsStored, buffers));
  XlaPool pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

ffi::Error ScaledDot(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  const FloatMode mode;
  return AnswerOf("jaxfp8_scaled_dot", [&] { return Compute(threads, args, rets, attributes); });
}

bool InRange(int kernel) { return kernel >= 0 && kernel < jaxfp8_cpu_kernel_count(); }

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" {

XLA_FFI_Error* jaxfp8_scaled_dot(XLA_FFI_CallFrame* call_frame);

const char* jaxfp8_version() { return JAXFP8_VERSION; }

void jaxfp8_ffi_api_version(int* major, int* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}

const char* jaxfp8_cpu_features() { return jaxfp8::CpuFeatureNames(); }

int jaxfp8_cpu_kernel_count() { return static_cast<int>(jaxfp8::AllKernels().size()); }

const char* jaxfp8_cpu_kernel_name(int kernel) {
  return jaxfp8::InRange(kernel) ? jaxfp8::AllKernels()[kernel]->name : "";
}

int jaxfp8_cpu_kernel_available(int kernel) {
  return jaxfp8::InRange(kernel) && !(jaxfp8::AllKernels()[kernel]->needs & ~jaxfp8::CpuFeatures());
}

uint64_t jaxfp8_cpu_kernel_calls(int kernel) { return jaxfp8::CallsOf(kernel); }

void jaxfp8_cpu_reset_counters() { jaxfp8::ResetCalls(); }

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_scaled_dot, jaxfp8::ScaledDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>());

#pragma GCC visibility pop
