// The scaled dot in float64 by its definition.

#pragma once

#include <vector>

#include "tests/cpu/case.h"
#include "tests/cpu/operands.h"

namespace jaxfp8::tests {

// By output element: `y` before `out_scale`, and the error that the project allows it.
struct Exact {
  std::vector<double> y, error, out_scale;
};

Exact Compute(const Case& from, const Operands& operands);

}  // namespace jaxfp8::tests
