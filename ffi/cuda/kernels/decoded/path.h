// Path "decoded_w8a16": two 8-bit sides. The scales of one change along K more often than a tensor
// core can rescale its sums.
//
//   the side with fewer values   -- kernels/pack -->   bfloat16, in the workspace
//   the other side               -- in place ------>   `sm90_gemm` or `sm80_w8a16`, as its weights
//
// Decoding is exact: 8-bit values fit bfloat16, and exponents (float8_e8m0fnu) are folded into
// them. A scale that is constant along K stays with the product.

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "cuda/path.h"

namespace jaxfp8::cuda::decoded {

// What the path makes of a problem.
struct DecodedForm {
  bool left = true;                           // whether lhs is decoded
  Problem product;                            // with that side in bfloat16
  int64_t lines = 0, batches = 1, pitch = 0;  // of the decoded side, in elements
  size_t bytes = 0;                           // of it in the workspace
};

// Chooses the side and makes the form, or says why neither can be decoded. Pure.
Status MakeForm(const Problem& problem, DecodedForm& form);

// The path that multiplies what is decoded, on a device; null if there is none.
const Path* PathOf(const Problem& product, const Device& device);

}  // namespace jaxfp8::cuda::decoded
