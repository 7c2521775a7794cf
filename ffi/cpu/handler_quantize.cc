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
  const FloatMode mode;
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

Status ComputeAmax(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  const FloatMode mode;
  const std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  if (operands.size() != 1 || results.size() != 1) return "it needs `x` and one result";
  const Buffer &from = operands[0], &amax = results[0];
  if (from.shape.size() != 2 || !IsWideFloat(from.dtype)) {
    return "`x` needs two axes and to be float32, bfloat16 or float16";
  }
  if (amax.dtype != DType::kF32 || amax.shape.size() != 1 || amax.shape[0] != from.shape[0]) {
    return "the result needs one axis, of the size of the first of `x`, and float32";
  }
  XlaPool pool(threads);
  FindRowAmax(from.data, from.dtype, from.shape[0], from.shape[1], static_cast<float*>(amax.data),
              pool);
  return {};
}

}  // namespace
}  // namespace jaxfp8

JAXFP8_CPU_HANDLER(jaxfp8_quantize, jaxfp8::Compute);
JAXFP8_CPU_HANDLER(jaxfp8_amax, jaxfp8::ComputeAmax);
