// The XLA FFI handler `jaxfp8_quantize`, which common/quantize_call.h describes.
//
// One attribute more, which need not be given: `kernel`, a string, the instruction set to use.

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "common/quantize_call.h"
#include "cpu/float_mode.h"
#include "cpu/quantize.h"
#include "cpu/xla_pool.h"

namespace jaxfp8 {
namespace {

std::string Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  QuantizeProblem problem;
  std::string wrong = Read(attributes, operands, problem);
  if (!wrong.empty()) return wrong;
  Reader read(attributes, "jaxfp8_quantize");
  std::string_view kernel;
  if (attributes.contains("kernel")) read("kernel", kernel);
  if (!read.wrong().empty()) return read.wrong();
  wrong = QuantizeWhyNot(problem, kernel);
  if (!wrong.empty()) return SayQuantize(wrong);
  QuantizeBuffers buffers;
  wrong = BindBuffers(problem, operands, Describe(rets), false, buffers);
  if (!wrong.empty()) return wrong;
  XlaPool pool(threads);
  Quantize(problem, buffers, kernel, pool);
  return "";
}

// Check, route, run. Nothing is thrown past here.
ffi::Error Handle(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  try {
    const FloatMode mode;
    const std::string wrong = Compute(threads, args, rets, attributes);
    return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(SayQuantize(error.what()));
  }
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_quantize(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize, jaxfp8::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>());

#pragma GCC visibility pop
