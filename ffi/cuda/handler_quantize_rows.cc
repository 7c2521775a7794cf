// The XLA FFI handler `jaxfp8_quantize_rows`: cuda/kernels/quantize_rows/problem.h in one call.
//
//   operands    x [rows, columns]; factor [rows, columns], if `factor`; gain [columns], if `gain`;
//               shift [columns], if `shift`
//   results     codes [rows, columns]; scale and amax [rows]
//   attributes  out_dtype, activation: string; norm, factor, gain, shift, centred, rounded_first,
//               rounded_second: bool; epsilon, amax_floor, scale_floor, of_zeros, of_nan: f32

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/buffer_taker.h"
#include "common/xla_call.h"
#include "cuda/bind.h"
#include "cuda/kernels/quantize_rows/problem.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kName = "jaxfp8_quantize_rows";

std::string Say(const std::string& what) { return "`" + std::string(kName) + "`: " + what; }

struct Flags {
  bool norm = false, centred = false, gain = false, shift = false;
};

std::string ReadRows(ffi::Dictionary attributes, Flags& flags, RowsProblem& to) {
  Reader read(attributes, kName);
  std::string_view out, activation;
  read("out_dtype", out);
  read("activation", activation);
  for (auto [name, flag] :
       {std::pair("norm", &flags.norm), std::pair("gain", &flags.gain),
        std::pair("shift", &flags.shift), std::pair("factor", &to.has_factor),
        std::pair("centred", &flags.centred), std::pair("rounded_first", &to.rounded_first),
        std::pair("rounded_second", &to.rounded_second)}) {
    read(name, *flag);
  }
  for (auto [name, number] :
       {std::pair("epsilon", &to.epsilon), std::pair("amax_floor", &to.amax_floor),
        std::pair("scale_floor", &to.scale_floor), std::pair("of_zeros", &to.of_zeros),
        std::pair("of_nan", &to.of_nan)}) {
    read(name, *number);
  }
  if (!read.wrong().empty()) return read.wrong();
  to.out = ParseDType(out);
  const Producer norm = flags.centred ? Producer::kLayerNorm : Producer::kRmsNorm;
  to.producer = flags.norm ? norm : Producer::kElementwise;
  to.activation = ParseActivation(activation);
  if (to.activation != Activation::kUnknown) return "";
  return Say("`activation` is \"" + std::string(activation) +
             "\", but needs to be none, relu, gelu_tanh, gelu_erf or silu");
}

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Takes a vector of float32 or of the type of x.
void TakeVector(BufferTaker& operand, const char* name, const RowsProblem& p, DType& type,
                const void*& to) {
  type = operand.NextType() == DType::kF32 ? DType::kF32 : p.in;
  operand(name, type, {p.columns}, to);
}

std::string BindRows(const Flags& flags, const std::vector<Buffer>& operands,
                     const std::vector<Buffer>& results, RowsProblem& p, RowsBuffers& to) {
  const std::vector<int64_t> matrix{p.rows, p.columns};
  BufferTaker operand(kName, operands), result(kName, results);
  operand("x", p.in, matrix, to.x);
  if (p.has_factor) operand("factor", p.in, matrix, to.factor);
  if (flags.gain) TakeVector(operand, "gain", p, p.gain, to.gain);
  if (flags.shift) TakeVector(operand, "shift", p, p.shift, to.shift);
  result("codes", p.out, matrix, to.codes);
  result("scale", DType::kF32, {p.rows}, to.scale);
  result("amax", DType::kF32, {p.rows}, to.amax);
  operand.End("operands");
  result.End("results");
  if (!operand.wrong().empty() || !result.wrong().empty()) {
    return operand.wrong().empty() ? result.wrong() : operand.wrong();
  }
  for (const void* data :
       {to.x, to.factor, to.gain, to.shift, static_cast<const void*>(to.codes)}) {
    if (!IsAligned(data)) return Say("every array has to begin at a multiple of 16 bytes");
  }
  return "";
}

std::string Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  if (operands.empty() || operands[0].shape.size() != 2) return Say("`x` needs two axes");
  RowsProblem problem;
  problem.rows = operands[0].shape[0], problem.columns = operands[0].shape[1];
  problem.in = operands[0].dtype;
  Flags flags;
  std::string wrong = ReadRows(attributes, flags, problem);
  if (!wrong.empty()) return wrong;
  RowsBuffers buffers;
  wrong = BindRows(flags, operands, Describe(rets), problem, buffers);
  if (!wrong.empty()) return wrong;
  wrong = RowsWhyNot(problem);
  if (!wrong.empty()) return Say(wrong);
  return LaunchRows(problem, buffers, stream);
}

ffi::Error QuantizeRows(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  return AnswerOf(kName, [&] { return Call(stream, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_quantize_rows(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_rows, jaxfp8::cuda::QuantizeRows,
                              jaxfp8::cuda::BindAll(), {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
