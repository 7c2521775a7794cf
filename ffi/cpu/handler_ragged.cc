// The XLA FFI handler `jaxfp8_ragged_dot`: products of groups, one scaled dot after the other.
//
// The attributes are those of `jaxfp8_scaled_dot` for one group with all rows, or all of K, and
// `grouping`; docs/custom_call.md has the operands.

#include <string_view>

#include "common/check.h"
#include "common/xla_call.h"
#include "cpu/float_mode.h"
#include "cpu/ragged.h"
#include "cpu/xla_pool.h"

namespace jaxfp8 {
namespace {

Status Compute(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attributes) {
  Request request;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, request));
  JAXFP8_RETURN_IF_ERROR(CheckSpec(request.spec));
  std::string_view grouping;
  Reader read(attributes);
  read("grouping", grouping);
  JAXFP8_RETURN_IF_ERROR(read.status());
  RaggedCall call{.spec = request.spec, .kernel = request.kernel};
  JAXFP8_RETURN_IF_ERROR(ParseGrouping(grouping, call.grouping));
  XlaPool pool(threads);
  return RunRagged(call, Describe(args), Describe(rets), pool);
}

ffi::Error RaggedDot(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  const FloatMode mode;
  return AnswerOf("jaxfp8_ragged_dot", [&] { return Compute(threads, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_ragged_dot(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_ragged_dot, jaxfp8::RaggedDot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<xla::ffi::Dictionary>());

#pragma GCC visibility pop
