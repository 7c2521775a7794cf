#include "cuda/kernels/attention/call.h"

#include <cstdint>
#include <string>

#include "common/buffer_taker.h"

namespace jaxfp8::cuda {
namespace {

Status ReadSizes(const AttentionFlags& flags, const std::vector<Buffer>& operands,
                 AttentionProblem& to) {
  if (operands.size() < 2 || operands[0].shape.size() != 4 || operands[1].shape.size() != 4) {
    return "`query` and `keys` need four axes each";
  }
  const Dims query = operands[0].shape, keys = operands[1].shape;
  to.texts = query[0], to.heads = query[1], to.rows = query[2], to.width = query[3];
  to.tokens = keys[flags.keys_by_token ? 1 : 2];
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

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

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
  operand(name, type, std::vector<int64_t>(shape.begin(), shape.end()), to);
  // Behind a failure the next shape is that of another operand.
  JAXFP8_RETURN_IF_ERROR(operand.status());
  return TermOf(name, full, shape, strides);
}

}  // namespace

Status BindAttention(const AttentionFlags& flags, const std::vector<Buffer>& operands,
                     const std::vector<Buffer>& results, AttentionProblem& p,
                     AttentionBuffers& to) {
  JAXFP8_RETURN_IF_ERROR(ReadSizes(flags, operands, p));
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
  JAXFP8_RETURN_IF_ERROR(result.End("results"));
  if (IsAligned(to.query) && IsAligned(to.keys) && IsAligned(to.values)) return {};
  return "query, keys and values have to begin at multiples of 16 bytes";
}

}  // namespace jaxfp8::cuda
