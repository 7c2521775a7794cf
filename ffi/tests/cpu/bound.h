// How far from the reference a result may lie.

#pragma once

#include <string>

#include "tests/cpu/reference.h"

namespace jaxfp8::tests {

// The first result that lies further from the reference than docs/design.md promises, as a
// sentence; "" if there is none.
std::string WhyBeyondBound(const Case& from, const Exact& exact, const Results& results);

// The first output that is not the reference's value, which its type must hold; NaN is NaN.
std::string WhyNotExact(const Exact& exact, const Results& results);

// The first float32 output further from `y` than `error`, without half an ulp for its rounding.
std::string WhyBeyondError(const Exact& exact, const Results& results);

}  // namespace jaxfp8::tests
