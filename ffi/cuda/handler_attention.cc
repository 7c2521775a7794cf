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

#include <string_view>
#include <utility>
#include <vector>

#include "common/xla_call.h"
#include "cuda/device.h"
#include "cuda/kernels/attention/call.h"
#include "cuda/plans.h"

namespace jaxfp8::cuda {
namespace {

Status ReadAttributes(ffi::Dictionary attributes, AttentionFlags& flags, AttentionProblem& to) {
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
  to.cache = ParseDType(cache);
  return read.status();
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args);
  AttentionFlags flags;
  AttentionProblem problem;
  AttentionBuffers buffers;
  JAXFP8_RETURN_IF_ERROR(ReadAttributes(attributes, flags, problem));
  JAXFP8_RETURN_IF_ERROR(BindAttention(flags, operands, Describe(rets), problem, buffers));
  Device device;
  {
    const RelaxedCapture relaxed;
    JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  }
  JAXFP8_RETURN_IF_ERROR(AttentionWhyNot(problem, device));
  return LaunchAttention(problem, buffers, device, stream);
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_attention, jaxfp8::cuda::Call);
