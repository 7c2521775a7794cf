// Every code of every 8-bit type is decoded exactly, in every place of a vector.

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

// A product in which either the left or the right side has all codes.
struct CodedSide {
  DType coded, other;
  bool left;

  Case Of(const Sizes& sizes, int layout) const {
    return left ? Matrices(coded, other, sizes, layout) : Matrices(other, coded, sizes, layout);
  }
  const Array& CodesOf(const Operands& all) const { return left ? all.lhs : all.rhs; }
  const Array& OtherOf(const Operands& all) const { return left ? all.rhs : all.lhs; }
};

std::vector<CodedSide> CodedSides() {
  std::vector<CodedSide> sides;
  for (auto [lhs, rhs] : TypePairs()) {
    if (IsEightBit(lhs)) sides.push_back({lhs, rhs, true});
    if (IsEightBit(rhs)) sides.push_back({rhs, lhs, false});
  }
  return sides;
}

}  // namespace

// A depth of 1 and ones on the other side: NaN and infinities included.
CLAIM(EveryCodeIsExactAsAWeightAndAsAnActivation) {
  for (const CodedSide& side : CodedSides()) {
    for (int layout = 0; layout < kLayouts; ++layout) {
      for (int64_t lines : {1, 5}) {
        const Case of = side.Of(side.left ? Sizes{256, 1, lines} : Sizes{lines, 1, 256}, layout);
        if (!harness.Begin(of.Text() + (side.left ? ", left" : ", right"))) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        FillWithCodes(side.CodesOf(operands), false);
        Fill(side.OtherOf(operands), 1.0);
        harness.CheckExact(of, operands);
      }
    }
  }
}

// A product with the identity: vectors of codes run along the contracted axis.
CLAIM(EveryFiniteCodeIsExactAlongTheDepth) {
  for (const CodedSide& side : CodedSides()) {
    for (int layout = 0; layout < kLayouts; ++layout) {
      const Case of = side.Of(side.left ? Sizes{2, 256, 256} : Sizes{256, 256, 2}, layout);
      if (!harness.Begin(of.Text() + (side.left ? ", left" : ", right"))) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      FillWithCodes(side.CodesOf(operands), true);
      FillWithIdentity(side.OtherOf(operands), 256);
      harness.CheckExact(of, operands);
    }
  }
}

// Each row picks one depth. The weight is so deep that tiles multiply it as it lies in memory.
CLAIM(EveryFiniteCodeIsExactForAnyNumberOfRows) {
  for (DType coded : kEightBit) {
    for (int layout : kWeightLayouts) {
      for (int64_t rows : {8, 12, 17, 48}) {
        const Case of = Matrices(DType::kS8, coded, {rows, 1024, 256}, layout);
        if (!harness.Begin(of.Text(), rows == 12 ? Cost::kSmall : Cost::kLarge)) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        FillWithCodes(operands.rhs, true);
        Fill(operands.lhs, 0.0);
        for (int64_t row = 0; row < rows; ++row) Put(operands.lhs, row * 1024 + 21 * row, 1.0);
        harness.CheckExact(of, operands);
      }
    }
  }
}

// All 256 x 256 products, by a depth of 1.
CLAIM(EveryIntegerTimesEveryOtherIsExact) {
  for (DType lhs : {DType::kS8, DType::kU8}) {
    for (DType rhs : {DType::kS8, DType::kU8}) {
      const Case of = Matrices(lhs, rhs, {256, 1, 256}, kAcross);
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      FillWithCodes(operands.lhs, false);
      FillWithCodes(operands.rhs, false);
      harness.CheckExact(of, operands);
    }
  }
}

// The identity picks every code in every place of a group of four.
CLAIM(EveryFiniteCodeOfPreparedColumnsIsExact) {
  for (auto [lhs, rhs] : TypePairs()) {
    if (!IsEightBit(rhs)) continue;
    for (int64_t rows : {256, 2}) {
      const Case of = Prepared(lhs, rhs, {rows, 256, 64});
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      FillWithCodes(operands.rhs, true);
      FillWithIdentity(operands.lhs, 256);
      harness.CheckExact(of, operands);
    }
  }
}

}  // namespace jaxfp8::tests
