// The element types by their definitions: what a code is worth, and which value of a type is
// nearest to a number.

#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8::tests {

// The value of a code of an 8-bit type.
double DecodedCode(DType dtype, uint8_t code);

// The largest finite value of a float type.
double HighestOf(DType dtype);

// The nearest value of an 8-bit type, ties to the even code; beyond the range its nearest end.
double RoundedTo(DType dtype, double value);

// Half the distance between neighbours of a float type around `y`.
double HalfUlp(DType dtype, double y);

}  // namespace jaxfp8::tests
