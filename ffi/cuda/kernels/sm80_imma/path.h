// Path "sm80_imma": up to 32 rows of int8 or 16 bits times FP8 weights, computed in int8.

#pragma once

#include "cuda/path.h"

namespace jaxfp8::cuda {

// It rounds operands a second time, as `compute="int8"` does, so it computes another number than
// other paths do. Only a call whose kernel is "int8" (route.h) or this one gets it. A call has
// these launches:
//   RoundRows    the activations as int8 codes in aligned lines, if they are not activations.cuh
//   Sm80Imma     the product, from reading the weights to the whole epilogue         kernel.cuh
extern const Path kSm80Imma;

}  // namespace jaxfp8::cuda
