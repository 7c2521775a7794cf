// The XLA FFI handler `jaxfp8_quantize`; see common/quantize_call.h.
//
// More attributes, all optional: `kernel`, a string, the instruction set to use; `plain` and
// `multiplies`, bools, and `lowest`, an i64, as in common/quantize.h.
//
// And `jaxfp8_amax`, from x [rows, columns] to the largest magnitude of each row, float32 [rows].

#include <string_view>
#include <vector>

#include "common/quantize_call.h"
#include "cpu/float_mode.h"
#include "cpu/quantize.h"
#include "cpu/xla_pool.h"

namespace jaxfp8 {
namespace {

Status Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  QuantizeProblem problem;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, operands, problem));
  Reader read(attributes);
  std::string_view kernel;
  if (attributes.contains("kernel")) read("kernel", kernel);
  if (attributes.contains("plain")) read("plain", problem.plain);
  if (attributes.contains("multiplies")) read("multiplies", problem.multiplies);
  if (attributes.contains("lowest")) read("lowest", problem.lowest);
  JAXFP8_RETURN_IF_ERROR(read.status());
  JAXFP8_RETURN_IF_ERROR(QuantizeWhyNot(problem, kernel));
  QuantizeBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindBuffers(problem, operands, Describe(rets), false, buffers));
  XlaPool pool(threads);
  Quantize(problem, buffers, kernel, pool);
  return {};
}

ffi::Error Handle(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  const FloatMode mode;
  return AnswerOf("jaxfp8_quantize", [&] { return Compute(threads, args, rets, attributes); });
}

Status ComputeAmax(ffi::ThreadPool& threads, ffi::AnyBuffer x, ffi::Buffer<ffi::F32>& amax) {
  const Buffer from = Describe(x);
  if (from.shape.size() != 2 || !IsWideFloat(from.dtype)) {
    return "`x` needs two axes and to be float32, bfloat16 or float16";
  }
  const auto rows = amax.dimensions();
  if (rows.size() != 1 || rows[0] != from.shape[0]) {
    return "the result needs one axis, of the size of the first of `x`";
  }
  XlaPool pool(threads);
  FindRowAmax(from.data, from.dtype, from.shape[0], from.shape[1], amax.typed_data(), pool);
  return {};
}

ffi::Error HandleAmax(ffi::ThreadPool threads, ffi::AnyBuffer x,
                      ffi::Result<ffi::Buffer<ffi::F32>> amax) {
  const FloatMode mode;
  return AnswerOf("jaxfp8_amax", [&] { return ComputeAmax(threads, x, *amax); });
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" {
XLA_FFI_Error* jaxfp8_quantize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* jaxfp8_amax(XLA_FFI_CallFrame* call_frame);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize, jaxfp8::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_amax, jaxfp8::HandleAmax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

#pragma GCC visibility pop
