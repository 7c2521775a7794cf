// The C function of include/jaxfp8_cpu.h to name the kernel of a spec, without any data.

#include <string>

#include "common/abi.h"
#include "cpu/axes.h"
#include "cpu/features.h"
#include "cpu/route.h"
#include "include/jaxfp8_cpu.h"

namespace jaxfp8 {
namespace {

// A line for each kernel: its name and, except for the chosen one, the reason against it.
std::string Lines(const Form& form, const Kernel& taken) {
  std::string lines;
  for (const Kernel* kernel : AllKernels()) {
    lines += std::string(kernel->name);
    if (kernel != &taken) {
      const Route alone = RouteTo(form, CpuFeatures(), kernel->name);
      lines += ": " + (alone.kernel ? "another suits the problem better" : alone.reason);
    }
    lines += "\n";
  }
  return lines;
}

Status RouteOf(const jaxfp8_scaled_dot_spec* spec, std::string& lines) {
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadRequest(spec, request));
  const Form form = FormOf(request.spec, AxesOf(request.spec));
  const Route route = RouteTo(form, CpuFeatures(), request.kernel);
  if (!route.kernel) return route.reason;
  lines = Lines(form, *route.kernel);
  return {};
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" int jaxfp8_cpu_route(const jaxfp8_scaled_dot_spec* spec, char* text, size_t size) {
  std::string lines;
  const int status = jaxfp8::Answer(text, size, [&] { return jaxfp8::RouteOf(spec, lines); });
  if (status == JAXFP8_OK) jaxfp8::WriteText(lines, text, size);
  return status;
}

#pragma GCC visibility pop
