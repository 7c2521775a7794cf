// The XLA FFI handler `jaxfp8_scaled_dot`, and what the library says of itself and its kernels.

#include <cstdint>
#include <exception>
#include <new>
#include <string>

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

std::string Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  Request request;
  std::string wrong = Read(attributes, request);
  if (wrong.empty()) wrong = CheckSpec(request.spec);
  if (!wrong.empty()) return wrong;
  Buffers buffers;
  wrong = BindBuffers(request.spec, Describe(args), Describe(rets), Accepts::kAsStored, buffers);
  if (!wrong.empty()) return wrong;
  XlaPool pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

// What XLA calls. Nothing is thrown past here.
ffi::Error ScaledDot(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  try {
    const FloatMode mode;
    const std::string wrong = Compute(threads, args, rets, attributes);
    return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "`jaxfp8_scaled_dot`: no memory for the panels of a thread");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("`jaxfp8_scaled_dot`: ") + error.what());
  }
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
