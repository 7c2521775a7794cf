// What follows the sum: activation, bias, residual, rounding to the output type, amax.

#include <cmath>
#include <limits>

#include "tests/cpu/draw.h"
#include "tests/cpu/formats.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A left side that kernels of integers take, and one that all kernels of floats do.
constexpr DType kRowTypes[] = {DType::kS8, DType::kBF16};

// A shape that broadcasts to [rows, columns]: full, one row, one column or one value.
Shape Broadcast(int64_t rows, int64_t columns, int kind) {
  return {kind & 1 ? 1 : rows, kind & 2 ? 1 : columns};
}

}  // namespace

// Every output type with every activation, residual type and form of what is added.
CLAIM(EveryEpilogueIsWithinTheBound) {
  constexpr DType kOut[] = {DType::kF32,  DType::kBF16, DType::kF16, DType::kE4M3,
                            DType::kE5M2, DType::kS8,   DType::kU8};
  constexpr DType kResidual[] = {DType::kNone, DType::kF32, DType::kBF16, DType::kF16};
  int turn = 0;
  for (DType out : kOut) {
    for (const char* activation : kActivations) {
      for (DType residual : kResidual) {
        for (int kind = 0; kind < 4; ++kind, ++turn) {
          const int64_t rows = turn % 2 ? 5 : 70, columns = turn % 2 ? 70 : 5;
          Case of = Matrices(DType::kU8, DType::kS8, {rows, 9, columns}, turn % kLayouts);
          of.out_dtype = out;
          of.activation = activation;
          of.rhs.scale = true;
          if (residual != DType::kNone) of.residual = Broadcast(rows, columns, kind);
          of.residual_dtype = residual;
          if (turn % 3) of.bias = Broadcast(rows, columns, (kind + 1) % 4);
          if (IsEightBit(out) && turn % 5) of.out_scale = Broadcast(rows, columns, (kind + 2) % 4);
          if (turn % 2) of.amax = Broadcast(rows, columns, (kind + turn / 4) % 4);
          harness.Draw(of);
        }
      }
    }
  }
}

// Sums from 1e-30 to 1e30, through every branch of the functions.
CLAIM(ActivationsHoldFromTinyToHuge) {
  for (DType lhs : {DType::kS8, DType::kE5M2}) {
    for (const char* activation : kActivations) {
      Case of = Matrices(lhs, DType::kS8, {2, 4, 200}, kAcross);
      of.activation = activation;
      of.rhs.tiles = {4, 1};
      of.rhs.scale = true;
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      for (int i = 0; i < 200; ++i) Put(operands.rhs_scale, i, std::pow(10, -30 + 60 * i / 199.0));
      harness.Check(of, operands);
    }
  }
}

// Sums are float64 until they are stored: 1e40 divided by an out_scale of 1e38 is 100.
CLAIM(ActivationsTakeSumsBeyondFloat32) {
  for (const char* activation : kActivations) {
    for (int64_t rows : {1, 40}) {
      Case of = Matrices(DType::kS8, DType::kS8, {rows, 1, 70}, kAcross);
      of.lhs.scale = of.rhs.scale = true;
      of.lhs.tiles = of.rhs.tiles = {1, 1};
      of.out_dtype = DType::kS8;
      of.activation = activation;
      of.out_scale = {1, 1};
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      Fill(operands.lhs, 1);
      Fill(operands.lhs_scale, 1e20);
      Fill(operands.rhs_scale, 1e20);
      for (int i = 0; i < 70; ++i) Put(operands.rhs, i, i % 2 ? -1 : 1);
      for (int i = 10; i < 20; ++i) Put(operands.rhs_scale, i, 1e17);  // sums that float32 holds
      Fill(operands.out_scale, 1e38);
      Exact exact;
      for (int64_t i = 0; i < rows * 70; ++i) {
        const int64_t column = i % 70;
        const double magnitude = column >= 10 && column < 20 ? 0 : 100;
        const double negative = of.activation == "none" ? -magnitude : 0;
        exact.y.push_back(column % 2 ? negative : magnitude);
      }
      harness.ForEachKernel(of, operands, [&](TestedKernel&, const Results& results) {
        return WhyNotExact(exact, results);
      });
    }
  }
}

// A half and 2^-32 is 1. Rounded to float32 first, it would be a half, and then 0.
CLAIM(IntegerOutputsAreRoundedOnce) {
  for (DType lhs : kRowTypes) {
    for (int64_t rows : {1, 40}) {
      Case of = Matrices(lhs, DType::kS8, {rows, 1, 3}, kAcross);
      of.rhs.scale = true;
      of.rhs.tiles = {1, 1};
      of.out_dtype = DType::kS8;
      of.bias = {1, 3}, of.out_scale = {1, 1};
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      Fill(operands.lhs, 1);
      for (int i = 0; i < 3; ++i) Put(operands.rhs, i, 1 - i);
      Fill(operands.rhs_scale, 0x1p-32);
      Fill(operands.bias, 0.5);
      Fill(operands.out_scale, 1);
      Exact exact;
      for (int64_t i = 0; i < rows * 3; ++i) exact.y.push_back(i % 3 == 0 ? 1 : 0);
      harness.ForEachKernel(of, operands, [&](TestedKernel&, const Results& results) {
        return WhyNotExact(exact, results);
      });
    }
  }
}

// The bias brings every value, beyond both ends of the range and about 0; the product is 0.
CLAIM(EightBitOutputsSaturateAndRoundToEven) {
  for (DType lhs : kRowTypes) {
    for (DType out : kEightBit) {
      constexpr int64_t kCoarse = 997, kFine = 999, n = kCoarse + kFine;
      Case of = Matrices(lhs, DType::kS8, {1, 1, n}, kAcross);
      of.out_dtype = out;
      of.bias = {1, n}, of.out_scale = {1, 1};
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      const double high = out == DType::kS8 ? 127 : out == DType::kU8 ? 255 : HighestOf(out);
      Fill(operands.lhs, 0);
      for (int64_t i = 0; i < kCoarse; ++i) {
        Put(operands.bias, i, 1.5 * high * (2.0 * static_cast<double>(i) / (kCoarse - 1) - 1));
      }
      for (int64_t i = 0; i < kFine; ++i) {
        Put(operands.bias, kCoarse + i, 0.1 * (2.0 * static_cast<double>(i) / (kFine - 1) - 1));
      }
      Fill(operands.out_scale, 1);
      Exact exact;
      Array codes(out, {n});
      for (int64_t i = 0; i < n; ++i) {
        const double value = ValueOf(operands.bias, i);
        exact.y.push_back(RoundedTo(out, value));
        Put(codes, i, std::copysign(exact.y[i], value));
      }
      harness.ForEachKernel(of, operands, [&](TestedKernel&, const Results& results) {
        const std::string wrong = WhyNotExact(exact, results);
        const bool same = SameValues(results.out, codes);
        return wrong.empty() && !same ? "a zero has the wrong sign" : wrong;
      });
    }
  }
}

CLAIM(NaNStaysNaNInFp8AndBecomes0InIntegersAndInfinitiesSaturate) {
  for (DType out : kEightBit) {
    Case of = Matrices(DType::kBF16, DType::kS8, {3, 1, 1}, kAcross);
    of.out_dtype = out;
    of.out_scale = {1, 1};
    if (!harness.Begin(of.Text())) continue;
    const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
    Put(operands.lhs, 0, NAN), Put(operands.lhs, 1, kInfinity), Put(operands.lhs, 2, -kInfinity);
    Fill(operands.rhs, 1);
    Fill(operands.out_scale, 1);
    Exact exact;
    exact.y = {IsInt8(out) ? 0 : NAN, RoundedTo(out, 1e9), RoundedTo(out, -1e9)};
    harness.ForEachKernel(of, operands, [&](TestedKernel&, const Results& results) {
      return WhyNotExact(exact, results);
    });
  }
}

CLAIM(AmaxReducesTheAxesOfSize1AndNaNWins) {
  for (DType lhs : {DType::kS8, DType::kE4M3}) {
    for (int kind = 0; kind < 4; ++kind) {
      Case of = Matrices(lhs, DType::kS8, {9, 20, 70}, kAcross);
      of.out_dtype = DType::kBF16;
      of.bias = {9, 70};
      of.amax = Broadcast(9, 70, kind);
      if (!harness.Begin(of.Text())) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      Put(operands.bias, 4 * 70 + 11, NAN);
      harness.Check(of, operands);
    }
  }
}

}  // namespace jaxfp8::tests
