// The scaled dot in float64 by its definition, and how far from it a result may lie.

#ifndef JAXFP8_TESTS_CPU_REFERENCE_H_
#define JAXFP8_TESTS_CPU_REFERENCE_H_

#include <string>
#include <vector>

#include "tests/cpu/case.h"

namespace jaxfp8::tests {

// The value of a code of an 8-bit type, from the definition of the type.
double DecodedCode(DType dtype, uint8_t code);

// `y` before `out_scale`, and the error it may carry, both by output element.
struct Exact {
  std::vector<double> y, error, out_scale;
};

Exact Compute(const Case& from, const Operands& operands);

// The first result that lies further from the reference than docs/design.md promises, as a
// sentence; "" if there is none.
std::string WhyWrong(const Case& from, const Exact& exact, const Results& results);

}  // namespace jaxfp8::tests

#endif  // JAXFP8_TESTS_CPU_REFERENCE_H_
