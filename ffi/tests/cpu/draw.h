// Cases to compute: products of two matrices by their sizes, and problems of any form.

#pragma once

#include <utility>
#include <vector>

#include "tests/cpu/case.h"
#include "tests/cpu/operands.h"

namespace jaxfp8::tests {

inline constexpr DType kEightBit[] = {DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8};
inline constexpr DType kWide[] = {DType::kF32, DType::kBF16, DType::kF16};
inline constexpr const char* kActivations[] = {"none", "relu", "gelu_tanh", "gelu_erf", "silu"};

// The pairs of operand types that a scaled dot takes.
std::vector<std::pair<DType, DType>> TypePairs();

struct Sizes {
  int64_t rows, depth, columns;
};

// The layouts of two matrices: bit 0 makes the left one [K, M], bit 1 the right one [N, K].
inline constexpr int kLayouts = 4, kAcross = 0, kAlong = 2;
inline constexpr int kWeightLayouts[] = {kAcross, kAlong};  // [K, N] and [N, K]

// A product of two matrices, without scales.
Case Matrices(DType lhs, DType rhs, const Sizes& sizes, int layout);

// Tiles of the right side of `Matrices`: so much depth of so many columns.
Shape WeightTiles(int layout, int64_t depth, int64_t columns);

// The same with a right side as `jaxfp8.prepare` lays it out; the depth is a multiple of 4, the
// columns of 64.
Case Prepared(DType lhs, DType rhs, const Sizes& sizes);

// Gives a case scales, zero points and an epilogue.
void DrawFactors(Case& to, Random& random);
void DrawEpilogue(Case& to, Random& random);

// Any types, number and order of axes, shared batch axes, tiles, zero points and epilogue.
Case DrawCase(Random& random);

}  // namespace jaxfp8::tests
