// A case computed by a kernel of the library.

#pragma once

#include <string>

#include "tests/cpu/case.h"
#include "tests/cpu/operands.h"

namespace jaxfp8::tests {

// Calls jaxfp8_cpu_scaled_dot, or what is behind it where a scale, a zero point or the bias has a
// dtype that only XLA's call takes. Returns its status. "" as the kernel lets the library choose.
int Call(const Case& from, const Operands& operands, const Results& results, const char* kernel,
         int threads, std::string& message);

// The kernel that jaxfp8_cpu_route names; "" where it refuses the case.
std::string RouteOf(const Case& from);

}  // namespace jaxfp8::tests
