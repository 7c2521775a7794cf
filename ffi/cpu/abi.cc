// The C function of include/jaxfp8/jaxfp8.h for the CPU.

#include "common/abi.h"

#include <algorithm>

#include "cpu/float_mode.h"
#include "cpu/pool.h"
#include "cpu/run.h"

namespace jaxfp8 {
namespace {

Status Compute(const jaxfp8_scaled_dot_spec* spec, const jaxfp8_scaled_dot_buffers* from,
               int threads) {
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadRequest(spec, request));
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(ReadBuffers(from, request.spec, buffers));
  const FloatMode mode;
  OwnThreads pool(std::max(threads, 1));
  return Run(request.spec, buffers, request.kernel, pool);
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" int jaxfp8_cpu_scaled_dot(const jaxfp8_scaled_dot_spec* spec,
                                     const jaxfp8_scaled_dot_buffers* buffers, int threads,
                                     char* message, size_t size) {
  return jaxfp8::Answer(message, size, [&] { return jaxfp8::Compute(spec, buffers, threads); });
}

#pragma GCC visibility pop
