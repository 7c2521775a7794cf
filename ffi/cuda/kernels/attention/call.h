// The operands and results of a call of attention, checked. Pure host code.

#pragma once

#include <vector>

#include "common/check.h"
#include "common/status.h"
#include "cuda/kernels/attention/problem.h"

namespace jaxfp8::cuda {

// Which operands a call has, and how its cache lies.
struct AttentionFlags {
  bool key_scale = false, value_scale = false, bias = false, lengths = false;
  bool keys_by_token = false, values_by_token = false;
};

// Reads sizes and strides from the buffers, and finds and checks them.
//   problem  with what the attributes say; the rest is filled in
Status BindAttention(const AttentionFlags& flags, const std::vector<Buffer>& operands,
                     const std::vector<Buffer>& results, AttentionProblem& problem,
                     AttentionBuffers& buffers);

}  // namespace jaxfp8::cuda
