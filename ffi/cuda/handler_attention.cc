// The XLA FFI handler `jaxfp8_attention`: attention of one decoding step,
// cuda/kernels/attention/problem.h.
//
//   operands    query [texts, heads, rows, width] of bfloat16; keys and values, each
//               [texts, heads, tokens, width], or [texts, tokens, heads, width] if it is by token;
//               then those named by attributes: key_scale and value_scale
//               [texts, heads, 1, tokens], bias [texts, heads, rows, tokens] of float32; lengths
//               [texts, 1, rows, 1] of int32. An axis of 1 stands for equal entries
//   results     out, as the query, of bfloat16 or float32; scratch [n] of uint8
//   attributes  cache: string, the dtype of keys and values (FP8 is typed or uint8); scale, masked:
//               f32; key_scale, value_scale, bias, lengths, equal_if_empty, keys_by_token,
//               values_by_token: bool

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/buffer_taker.h"
#include "common/xla_call.h"
#include "cuda/bind.h"
#include "cuda/device.h"
#include "cuda/kernels/attention/problem.h"
#include "cuda/plans.h"

namespace jaxfp8::cuda {
namespace {

struct AttentionFlags {
  bool key_scale = false, value_scale = false, bias = false, lengths = false;
  bool keys_by_token = false, values_by_token = false;
};

Status ReadProblem(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
                   AttentionFlags& flags, AttentionProblem& to) {
  Reader read(attributes);
  std::string_view cache;
  read("cache", cache);
  read("scale", to.scale);
  read("masked", to.masked);
  for (auto [name, flag] :
       {std::pair("key_scale", &flags.key_scale), std::pair("value_scale", &flags.value_scale),
        std::pair("bias", &flags.bias), std::pair("lengths", &flags.lengths),
        std::pair("keys_by_token", &flags.keys_by_token),
        std::pair("values_by_token", &flags.values_by_token),
        std::pair("equal_if_empty", &to.equal_if_empty)}) {
    read(name, *flag);
  }
  JAXFP8_RETURN_IF_ERROR(read.status());
  if (operands.size() < 2 || operands[0].shape.size() != 4 || operands[1].shape.size() != 4) {
    return "`query` and `keys` need four axes each";
  }
  const Dims query = operands[0].shape, keys = operands[1].shape;
  to.texts = query[0], to.heads = query[1], to.rows = query[2], to.width = query[3];
  to.tokens = keys[flags.keys_by_token ? 1 : 2];
  to.cache = ParseDType(cache);
  return {};
}

std::vector<int64_t> CacheShape(const AttentionProblem& p, bool by_token) {
  if (by_token) return {p.texts, p.tokens, p.heads, p.width};
  return {p.texts, p.heads, p.tokens, p.width};
}

CacheStrides StridesOf(const AttentionProblem& p, bool by_token) {
  const int64_t text = p.tokens * p.heads * p.width;
  if (by_token) return {text, p.width, p.heads * p.width};
  return {text, p.tokens * p.width, p.width};
}

// The strides of an array with 1 for axes along which it does not change.
Status TermOf(const char* name, const std::vector<int64_t>& full, Dims shape, TermStrides& to) {
  int64_t stride = 1, strides[4] = {};
  for (int axis = 3; axis >= 0; --axis) {
    if (shape.size() != 4 || (shape[axis] != 1 && shape[axis] != full[axis])) {
      return "`" + std::string(name) + "` has shape " + ShapeText(shape) +
             ", but needs 1 or all of each axis of " + ShapeText(Dims(full.data(), full.size()));
    }
    strides[axis] = shape[axis] == 1 ? 0 : stride;
    stride *= shape[axis];
  }
  to = {strides[0], strides[1], strides[2], strides[3]};
  return {};
}

// Takes an array that a call may leave out.
//   full  its shape if it changes along every axis
template <class Data>
Status TakeTerm(BufferTaker& operand, const char* name, DType type,
                const std::vector<int64_t>& full, TermStrides& strides, Data& to) {
  const Dims shape = operand.NextShape();
  JAXFP8_RETURN_IF_ERROR(TermOf(name, full, shape, strides));
  operand(name, type, std::vector<int64_t>(shape.begin(), shape.end()), to);
  return {};
}

Status Bind(const AttentionFlags& flags, const std::vector<Buffer>& operands,
            const std::vector<Buffer>& results, AttentionProblem& p, AttentionBuffers& to) {
  BufferTaker operand(operands), result(results);
  const std::vector<int64_t> rows{p.texts, p.heads, p.rows, p.width};
  operand("query", DType::kBF16, rows, to.query);
  operand("keys", p.cache, CacheShape(p, flags.keys_by_token), to.keys);
  operand("values", p.cache, CacheShape(p, flags.values_by_token), to.values);
  p.keys = StridesOf(p, flags.keys_by_token), p.values = StridesOf(p, flags.values_by_token);
  const std::vector<int64_t> of_cache{p.texts, p.heads, 1, p.tokens};
  const std::vector<int64_t> of_scores{p.texts, p.heads, p.rows, p.tokens};
  const std::vector<int64_t> of_rows{p.texts, 1, p.rows, 1};
  const auto take = [&](bool given, const char* name, DType type, const auto& full, auto& strides,
                        auto& array) {
    return given ? TakeTerm(operand, name, type, full, strides, array) : Status();
  };
  JAXFP8_RETURN_IF_ERROR(
      take(flags.key_scale, "key_scale", DType::kF32, of_cache, p.key_scale, to.key_scale));
  JAXFP8_RETURN_IF_ERROR(
      take(flags.value_scale, "value_scale", DType::kF32, of_cache, p.value_scale, to.value_scale));
  JAXFP8_RETURN_IF_ERROR(take(flags.bias, "bias", DType::kF32, of_scores, p.bias, to.bias));
  JAXFP8_RETURN_IF_ERROR(
      take(flags.lengths, "lengths", DType::kS32, of_rows, p.lengths, to.lengths));
  p.out = result.NextType();
  result("out", p.out, rows, to.out);
  to.scratch_bytes = result.TakeBytes(to.scratch);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  return result.End("results");
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  AttentionFlags flags;
  AttentionProblem problem;
  AttentionBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(ReadProblem(attributes, operands, flags, problem));
  JAXFP8_RETURN_IF_ERROR(Bind(flags, operands, Describe(rets), problem, buffers));
  const RelaxedCapture relaxed;
  Device device;
  JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  JAXFP8_RETURN_IF_ERROR(AttentionWhyNot(problem, device));
  return LaunchAttention(problem, buffers, device, stream);
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_attention, jaxfp8::cuda::Call);
