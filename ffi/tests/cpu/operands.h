// What a case is computed from, and where results go.

#pragma once

#include <random>

#include "tests/cpu/array.h"
#include "tests/cpu/case.h"

namespace jaxfp8::tests {

using Random = std::mt19937_64;

struct Operands {
  Array lhs, rhs, lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point, residual, bias, out_scale;
};

struct Results {
  Array out, amax;
};

// What the values of the sides are drawn from.
enum class Values {
  kFinite,   // any finite code; wide types about 1
  kSpecial,  // now and then NaN and infinity too
};

Operands DrawOperands(const Case& from, Values values, Random& random);

// A number from [0, end).
int64_t Below(Random& random, int64_t end);

// Stores numbers from the list, drawn one by one.
void FillFrom(const Array& array, const std::vector<double>& list, Random& random);

// Divides scales by the largest of them.
void MakeAtMostOne(const Array& scale);

// The same numbers in another element type.
Array As(DType dtype, const Array& from);

// Results full of bytes that no kernel leaves behind.
Results SoiledResults(const Case& from);

}  // namespace jaxfp8::tests
