// The XLA FFI handler `jaxfp8_encode`: cuda/kernels/encode/problem.h in one call.
//
//   operands    those of cuda/production_call.h, where x of float32 is rounded to `row_dtype`, and,
//               of a norm, inverse [rows] and, if `centred`, mean [rows] behind x; then the scales,
//               float32 [1] each
//   results     for each scale codes [rows, columns] and, if `transposed`, codes [columns, rows];
//               then amax [1]
//   attributes  those of cuda/production_call.h; out_dtype, row_dtype: string; transposed: bool;
//               scales: i64

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/bind.h"
#include "cuda/kernels/encode/problem.h"
#include "cuda/production_call.h"

namespace jaxfp8::cuda {
namespace {

Status ReadEncode(ffi::Dictionary attributes, DType x, ProductionFlags& flags, EncodeProblem& to) {
  Reader read(attributes);
  std::string_view out, row;
  read("out_dtype", out);
  read("row_dtype", row);
  read("transposed", to.transposed);
  read("scales", to.scales);
  JAXFP8_RETURN_IF_ERROR(ReadProduction(read, flags, to));
  to.out = ParseDType(out), to.in = ParseDType(row);
  if (x == DType::kF32) to.producer = Producer::kCast;
  return {};
}

Status BindEncode(const ProductionFlags& flags, const std::vector<Buffer>& operands,
                  const std::vector<Buffer>& results, EncodeProblem& p, EncodeBuffers& to) {
  BufferTaker operand(operands), result(results);
  TakeRows(operand, p, to);
  if (flags.norm) operand("inverse", DType::kF32, {p.rows}, to.inverse);
  if (flags.norm && flags.centred) operand("mean", DType::kF32, {p.rows}, to.mean);
  TakeVectors(operand, flags, p, to);
  bool aligned = true;
  for (int64_t i = 0; i < p.scales; ++i) {
    operand("scale", DType::kF32, {1}, to.scale[i]);
    result("codes", p.out, {p.rows, p.columns}, to.codes[i]);
    if (p.transposed) result("transposed codes", p.out, {p.columns, p.rows}, to.transposed[i]);
    aligned = aligned && IsAligned(to.codes[i]) && IsAligned(to.transposed[i]);
  }
  result("amax", DType::kF32, {1}, to.amax);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  JAXFP8_RETURN_IF_ERROR(result.End("results"));
  if (aligned && IsAligned(to)) return {};
  return "every array has to begin at a multiple of 16 bytes";
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  if (operands.empty() || operands[0].shape.size() != 2) return "`x` needs two axes";
  EncodeProblem problem;
  problem.rows = operands[0].shape[0], problem.columns = operands[0].shape[1];
  ProductionFlags flags;
  JAXFP8_RETURN_IF_ERROR(ReadEncode(attributes, operands[0].dtype, flags, problem));
  JAXFP8_RETURN_IF_ERROR(EncodeWhyNot(problem));
  EncodeBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindEncode(flags, operands, Describe(rets), problem, buffers));
  return LaunchEncode(problem, buffers, stream);
}

ffi::Error Encode(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Dictionary attributes) {
  return AnswerOf("jaxfp8_encode", [&] { return Call(stream, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_encode(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_encode, jaxfp8::cuda::Encode, jaxfp8::cuda::BindAll(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
