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
  const FloatMode mode;
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

}  // namespace
}  // namespace jaxfp8

JAXFP8_CPU_HANDLER(jaxfp8_ragged_dot, jaxfp8::Compute);
