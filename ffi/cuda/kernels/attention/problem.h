// Attention of one decoding step: a few rows of queries over a cache of keys and values.
//
//   score   = sum_d query[r, d] keys[t, d] * scale * key_scale[t] + bias[r, t]
//   weight  = exp(score - max) / sum exp(score - max)         over tokens, in float32
//   out     = sum_t weight * value_scale[t] * values[t, d]
//
// for each text and each head of the cache. A bias of at most `masked` replaces the score. Tokens
// from `lengths` on have the weight 0.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"
#include "cuda/device.h"

namespace jaxfp8::cuda {

// Strides in elements. 0 repeats one element along an axis.
struct CacheStrides {
  int64_t text = 0, head = 0, token = 0;
};

struct TermStrides {
  int64_t text = 0, head = 0, row = 0, token = 0;
};

// Queries and outputs are [texts, heads, rows, width], dense.
//   heads  those of the cache
//   rows   query heads for each of them, times new tokens of a text
struct AttentionProblem {
  int64_t texts = 0, heads = 0, rows = 0, tokens = 0, width = 0;
  DType cache = DType::kNone;  // bfloat16, float8_e4m3fn or int8
  DType out = DType::kNone;    // bfloat16 or float32; queries are bfloat16
  float scale = 1.0f, masked = -0x1p100f;
  // The weights of a row without tokens: all equal, or NaN.
  bool equal_if_empty = false;
  CacheStrides keys, values;
  TermStrides key_scale, value_scale, bias, lengths;
};

// Null stands for a scale of 1, a bias of 0, or all tokens.
struct AttentionBuffers {
  const void *query = nullptr, *keys = nullptr, *values = nullptr;
  const float *key_scale = nullptr, *value_scale = nullptr, *bias = nullptr;
  const int32_t* lengths = nullptr;
  void* out = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
};

// Why the kernel cannot compute a problem.
Status AttentionWhyNot(const AttentionProblem& problem, const Device& device);

Status LaunchAttention(const AttentionProblem& problem, const AttentionBuffers& buffers,
                       const Device& device, cudaStream_t stream);

}  // namespace jaxfp8::cuda
