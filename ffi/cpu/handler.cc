// The XLA FFI handlers, and the library's account of itself and its kernels. Nothing else here sees
// XLA's headers.
//
//   jaxfp8_scaled_dot   docs/custom_call.md
//   jaxfp8_ragged_dot   products of groups, one scaled dot after the other: the attributes of a
//                       scaled dot for one group with all rows, or all of K, and `grouping`
//   jaxfp8_quantize     common/quantize_call.h. More attributes, all optional: `kernel`, a string,
//                       the instruction set to use; `plain` and `multiplies`, bools, and `lowest`,
//                       an i64, as in common/quantize.h
//   jaxfp8_amax         from x [rows, columns] to the largest magnitude of each row, float32 [rows]

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/quantize_call.h"
#include "common/xla_call.h"
#include "cpu/features.h"
#include "cpu/float_mode.h"
#include "cpu/pool.h"
#include "cpu/quantize.h"
#include "cpu/ragged.h"
#include "cpu/route.h"
#include "cpu/run.h"
#include "include/jaxfp8_cpu.h"

namespace jaxfp8 {
namespace {

// XLA's threads as a pool.
class XlaPool : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool)
      : pool_(pool), threads_(std::max<int64_t>(pool.num_threads(), 1)) {}

  int64_t threads() const override { return threads_; }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
  int64_t threads_;
};

Status ReadChecked(ffi::Dictionary attributes, Request& request) {
  JAXFP8_RETURN_IF_ERROR(Read(attributes, request));
  return CheckSpec(request.spec);
}

Status ComputeDot(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  const FloatMode mode;
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadChecked(attributes, request));
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(
      BindBuffers(request.spec, Describe(args), Describe(rets), Accepts::kAsStored, buffers));
  XlaPool pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

Status ComputeRagged(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  const FloatMode mode;
  Request request;
  JAXFP8_RETURN_IF_ERROR(ReadChecked(attributes, request));
  std::string_view grouping;
  Reader read(attributes);
  read("grouping", grouping);
  JAXFP8_RETURN_IF_ERROR(read.status());
  RaggedCall call{.spec = request.spec, .kernel = request.kernel};
  JAXFP8_RETURN_IF_ERROR(ParseGrouping(grouping, call.grouping));
  XlaPool pool(threads);
  return RunRagged(call, Describe(args), Describe(rets), pool);
}

Status ComputeQuantize(ffi::ThreadPool& threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
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

JAXFP8_CPU_HANDLER(jaxfp8_scaled_dot, jaxfp8::ComputeDot);
JAXFP8_CPU_HANDLER(jaxfp8_ragged_dot, jaxfp8::ComputeRagged);
JAXFP8_CPU_HANDLER(jaxfp8_quantize, jaxfp8::ComputeQuantize);
JAXFP8_CPU_HANDLER(jaxfp8_amax, jaxfp8::ComputeAmax);
