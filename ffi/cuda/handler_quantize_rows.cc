// The XLA FFI handler `jaxfp8_quantize_rows`: cuda/kernels/quantize_rows/problem.h in one call.
//
//   operands    those of cuda/production_call.h
//   results     codes [rows, columns]; scale and amax [rows]
//   attributes  those of cuda/production_call.h; out_dtype: string; epsilon, amax_floor,
//               scale_floor, of_zeros, of_nan: f32

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/bind.h"
#include "cuda/kernels/quantize_rows/problem.h"
#include "cuda/production_call.h"

namespace jaxfp8::cuda {
namespace {

Status ReadRows(ffi::Dictionary attributes, ProductionFlags& flags, RowsProblem& to) {
  Reader read(attributes);
  std::string_view out;
  read("out_dtype", out);
  for (auto [name, number] :
       {std::pair("epsilon", &to.epsilon), std::pair("amax_floor", &to.amax_floor),
        std::pair("scale_floor", &to.scale_floor), std::pair("of_zeros", &to.of_zeros),
        std::pair("of_nan", &to.of_nan)}) {
    read(name, *number);
  }
  JAXFP8_RETURN_IF_ERROR(ReadProduction(read, flags, to));
  to.out = ParseDType(out);
  return {};
}

Status BindRows(const ProductionFlags& flags, const std::vector<Buffer>& operands,
                const std::vector<Buffer>& results, RowsProblem& p, RowsBuffers& to) {
  BufferTaker operand(operands), result(results);
  TakeRows(operand, p, to);
  TakeVectors(operand, flags, p, to);
  result("codes", p.out, {p.rows, p.columns}, to.codes);
  result("scale", DType::kF32, {p.rows}, to.scale);
  result("amax", DType::kF32, {p.rows}, to.amax);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  JAXFP8_RETURN_IF_ERROR(result.End("results"));
  if (IsAligned(to) && IsAligned(to.codes)) return {};
  return "every array has to begin at a multiple of 16 bytes";
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  if (operands.empty() || operands[0].shape.size() != 2) return "`x` needs two axes";
  RowsProblem problem;
  problem.rows = operands[0].shape[0], problem.columns = operands[0].shape[1];
  problem.in = operands[0].dtype;
  ProductionFlags flags;
  JAXFP8_RETURN_IF_ERROR(ReadRows(attributes, flags, problem));
  RowsBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindRows(flags, operands, Describe(rets), problem, buffers));
  JAXFP8_RETURN_IF_ERROR(RowsWhyNot(problem));
  return LaunchRows(problem, buffers, stream);
}

ffi::Error QuantizeRows(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  return AnswerOf("jaxfp8_quantize_rows", [&] { return Call(stream, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_quantize_rows(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_rows, jaxfp8::cuda::QuantizeRows,
                              jaxfp8::cuda::BindAll(), {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
