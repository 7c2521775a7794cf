// The XLA FFI handlers of calls that quantize. `jaxfp8_quantize` takes values as they are:
// common/quantize_call.h. The other two produce rows and quantize them:
//
//   operands    x, and factor [rows, columns], if `factor`; gain [columns], if `gain`; shift
//               [columns], if `shift`
//   attributes  out_dtype, activation: string; norm, factor, gain, shift, centred, rounded_first,
//               rounded_second: bool
//
// `jaxfp8_quantize_rows` finds a scale for each row: cuda/kernels/produce/problem.h.
//
//   results     codes [rows, columns]; scale and amax [rows]
//   attributes  epsilon, amax_floor, scale_floor, of_zeros, of_nan: f32
//
// `jaxfp8_encode` is given scales: cuda/kernels/produce/problem.h. It rounds x of float32 to
// `row_dtype`.
//
//   operands    of a norm, inverse [rows] and, if `centred`, mean [rows] behind x; then the scales,
//               float32 [1] each
//   results     for each scale codes [rows, columns] and, if `transposed`, codes [columns, rows];
//               then amax [1]
//   attributes  row_dtype: string; transposed: bool; scales: i64

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/quantize_call.h"
#include "cuda/kernels/produce/problem.h"
#include "cuda/kernels/quantize/quantize.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

Status CallQuantize(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  QuantizeProblem problem;
  JAXFP8_RETURN_IF_ERROR(Read(attributes, operands, problem));
  JAXFP8_RETURN_IF_ERROR(QuantizeWhyNot(problem));
  QuantizeBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindBuffers(problem, operands, Describe(rets), true, buffers));
  JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, QuantizeWorkspace(problem)));
  return LaunchQuantize(problem, buffers, stream);
}

struct ProductionFlags {
  bool norm = false, centred = false, gain = false, shift = false;
};

// Reads the attributes.
Status ReadProduction(Reader& read, ProductionFlags& flags, Production& to) {
  std::string_view activation;
  read("activation", activation);
  for (auto [name, flag] :
       {std::pair("norm", &flags.norm), std::pair("gain", &flags.gain),
        std::pair("shift", &flags.shift), std::pair("factor", &to.has_factor),
        std::pair("centred", &flags.centred), std::pair("rounded_first", &to.rounded_first),
        std::pair("rounded_second", &to.rounded_second)}) {
    read(name, *flag);
  }
  JAXFP8_RETURN_IF_ERROR(read.status());
  const Producer norm = flags.centred ? Producer::kLayerNorm : Producer::kRmsNorm;
  to.producer = flags.norm ? norm : Producer::kElementwise;
  to.activation = ParseActivation(activation);
  if (to.activation != Activation::kUnknown) return {};
  return "`activation` is \"" + std::string(activation) + "\", but needs to be one of " +
         kActivationNames;
}

void TakeRows(BufferTaker& operand, const Production& p, ProductionBuffers& to) {
  const std::vector<int64_t> matrix{p.rows, p.columns};
  operand("x", p.producer == Producer::kCast ? DType::kF32 : p.in, matrix, to.x);
  if (p.has_factor) operand("factor", p.in, matrix, to.factor);
}

// Takes gain and shift, each of float32 or of the type of x.
void TakeVectors(BufferTaker& operand, const ProductionFlags& flags, Production& p,
                 ProductionBuffers& to) {
  const auto take = [&](const char* name, DType& type, const void*& vector) {
    type = operand.NextType() == DType::kF32 ? DType::kF32 : p.in;
    operand(name, type, {p.columns}, vector);
  };
  if (flags.gain) take("gain", p.gain, to.gain);
  if (flags.shift) take("shift", p.shift, to.shift);
}

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

bool IsAligned(const ProductionBuffers& b) {
  return IsAligned(b.x) && IsAligned(b.factor) && IsAligned(b.gain) && IsAligned(b.shift);
}

// A scale that is found for each row.
struct Found {
  using Problem = RowsProblem;
  using Buffers = RowsBuffers;

  static void Read(Reader& read, DType x, Problem& to) {
    for (auto [name, number] :
         {std::pair("epsilon", &to.epsilon), std::pair("amax_floor", &to.amax_floor),
          std::pair("scale_floor", &to.scale_floor), std::pair("of_zeros", &to.of_zeros),
          std::pair("of_nan", &to.of_nan)}) {
      read(name, *number);
    }
    to.in = x;
  }

  static Status WhyNot(const Problem& p) { return RowsWhyNot(p); }

  // Takes the arrays; whether those of codes are aligned.
  static bool Take(BufferTaker& operand, BufferTaker& result, const ProductionFlags& flags,
                   Problem& p, Buffers& to) {
    TakeVectors(operand, flags, p, to);
    result("codes", p.out, {p.rows, p.columns}, to.codes);
    result("scale", DType::kF32, {p.rows}, to.scale);
    result("amax", DType::kF32, {p.rows}, to.amax);
    return IsAligned(to.codes);
  }

  static Status Launch(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
    return LaunchRows(p, buffers, stream);
  }
};

// Scales that are given for the whole array.
struct Given {
  using Problem = EncodeProblem;
  using Buffers = EncodeBuffers;

  static void Read(Reader& read, DType x, Problem& to) {
    std::string_view row;
    read("row_dtype", row);
    read("transposed", to.transposed);
    read("scales", to.scales);
    to.in = ParseDType(row);
    if (x == DType::kF32) to.producer = Producer::kCast;
  }

  static Status WhyNot(const Problem& p) { return EncodeWhyNot(p); }

  // Takes the arrays; whether those of codes are aligned.
  static bool Take(BufferTaker& operand, BufferTaker& result, const ProductionFlags& flags,
                   Problem& p, Buffers& to) {
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
    return aligned;
  }

  static Status Launch(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
    return LaunchEncode(p, buffers, stream);
  }
};

template <class Scale>
Status ReadProblem(ffi::Dictionary attributes, DType x, ProductionFlags& flags,
                   typename Scale::Problem& to) {
  Reader read(attributes);
  std::string_view out;
  read("out_dtype", out);
  JAXFP8_RETURN_IF_ERROR(ReadProduction(read, flags, to));
  Scale::Read(read, x, to);
  to.out = ParseDType(out);
  return read.status();
}

template <class Scale>
Status Bind(const ProductionFlags& flags, const std::vector<Buffer>& operands,
            const std::vector<Buffer>& results, typename Scale::Problem& p,
            typename Scale::Buffers& to) {
  BufferTaker operand(operands), result(results);
  TakeRows(operand, p, to);
  const bool aligned = Scale::Take(operand, result, flags, p, to);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  JAXFP8_RETURN_IF_ERROR(result.End("results"));
  if (aligned && IsAligned(to)) return {};
  return "every array has to begin at a multiple of 16 bytes";
}

template <class Scale>
Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  if (operands.empty() || operands[0].shape.size() != 2) return "`x` needs two axes";
  typename Scale::Problem problem;
  problem.rows = operands[0].shape[0], problem.columns = operands[0].shape[1];
  ProductionFlags flags;
  JAXFP8_RETURN_IF_ERROR(ReadProblem<Scale>(attributes, operands[0].dtype, flags, problem));
  JAXFP8_RETURN_IF_ERROR(Scale::WhyNot(problem));
  typename Scale::Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(Bind<Scale>(flags, operands, Describe(rets), problem, buffers));
  return Scale::Launch(problem, buffers, stream);
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_quantize, jaxfp8::cuda::CallQuantize);
JAXFP8_CUDA_HANDLER(jaxfp8_quantize_rows, jaxfp8::cuda::Call<jaxfp8::cuda::Found>);
JAXFP8_CUDA_HANDLER(jaxfp8_encode, jaxfp8::cuda::Call<jaxfp8::cuda::Given>);
