// Scales, zero points and the bias may be stored in other types, with the same bits.

#include <cmath>
#include <limits>
#include <map>

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

using Outputs = std::map<std::string, Results>;

// Each kernel's results, held against the bound.
Outputs CheckedResults(Harness& harness, const Case& of, const Operands& operands) {
  Outputs all;
  const Exact exact = Compute(of, operands);
  harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& results) {
    all[kernel.name] = {results.out.Copy(), results.amax.Copy()};
    return WhyBeyondBound(of, exact, results);
  });
  return all;
}

Outputs AllResults(Harness& harness, const Case& of, const Operands& operands) {
  Outputs all;
  harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& results) {
    all[kernel.name] = {results.out.Copy(), results.amax.Copy()};
    return "";
  });
  return all;
}

void ExpectSame(Harness& harness, const Case& of, const Operands& operands,
                const Outputs& expected) {
  harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& results) {
    return SameValues(results.out, expected.at(kernel.name).out) ? "" : "other bits";
  });
}

}  // namespace

CLAIM(ScalesAndBiasOf16BitsGiveTheBitsOfFloat32) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (int64_t tile : {1, 20, 200}) {
      Case wide = Matrices(DType::kS8, DType::kS8, {3, 200, 131}, kAcross);
      wide.lhs.scale = wide.rhs.scale = true;
      wide.lhs.tiles = {1, 200}, wide.rhs.tiles = {tile, 1};
      wide.bias = {1, 131};
      wide.activation = "relu";
      if (!harness.Begin(wide.Text() + " as " + std::string(NameOf(dtype)))) continue;
      Operands operands = DrawOperands(wide, Values::kFinite, harness.random());
      // What 16 bits hold, so that both types hold the same numbers.
      for (Array* array : {&operands.lhs_scale, &operands.rhs_scale, &operands.bias}) {
        *array = As(DType::kF32, As(dtype, *array));
      }
      const Outputs expected = CheckedResults(harness, wide, operands);
      for (int which = 0; which < 3; ++which) {
        Case of = wide;
        (which == 0 ? of.lhs.scale_type : which == 1 ? of.rhs.scale_type : of.bias_dtype) = dtype;
        Array& array = which == 0   ? operands.lhs_scale
                       : which == 1 ? operands.rhs_scale
                                    : operands.bias;
        Array narrow = As(dtype, array);
        std::swap(array, narrow);
        ExpectSame(harness, of, operands, expected);
        std::swap(array, narrow);
      }
    }
  }
}

// To nearest even, of any magnitude: the bits of scales that were rounded before.
CLAIM(ScalesMayBeRoundedToBFloat16ByTheCall) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double some[] = {1 + 0x1p-8, 1 + 3 * 0x1p-8, -1.0039, 1e-39,   3.4e38,
                         0.0,        kInfinity,      NAN,     3.14159, 1e-20};
  constexpr std::pair<DType, DType> kTypes[] = {{DType::kS8, DType::kS8},
                                                {DType::kBF16, DType::kE4M3}};
  for (auto [lhs, rhs] : kTypes) {
    for (int64_t rows : {1, 130}) {
      for (int64_t tile : {1, 20, 200}) {
        Case of = Matrices(lhs, rhs, {rows, 200, 70}, kAcross);
        of.lhs.scale = of.rhs.scale = true;
        of.lhs.tiles = {1, 200}, of.rhs.tiles = {tile, 1};
        if (!harness.Begin(of.Text())) continue;
        Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        for (const bool left : {true, false}) {
          Array& scale = left ? operands.lhs_scale : operands.rhs_scale;
          Array before = scale.Copy();
          for (int64_t i = 0; i < std::min<int64_t>(std::size(some), scale.count()); ++i) {
            Put(scale, i, some[i]);
          }
          Array rounded = As(DType::kF32, As(DType::kBF16, scale));
          std::swap(scale, rounded);
          const Outputs expected = AllResults(harness, of, operands);
          std::swap(scale, rounded);
          Case by_call = of;
          (left ? by_call.lhs : by_call.rhs).scale_rounded = true;
          ExpectSame(harness, by_call, operands, expected);
          std::swap(scale, before);
        }
      }
    }
  }
}

CLAIM(ScalesOf16BitsHoldFromEndToEnd) {
  const struct {
    DType dtype;
    std::vector<double> some;
  } kLists[] = {{DType::kBF16, {0x1p60, -0x1p-60, 0.0, 1e-39, 3.0}},
                {DType::kF16, {65504, 0x1p-24, 0, -1}}};
  for (const auto& list : kLists) {
    for (int64_t rows : {1, 130}) {
      for (int64_t tile : {1, 20}) {
        Case of = Matrices(DType::kBF16, DType::kE4M3, {rows, 200, 70}, kAcross);
        of.rhs.scale = true;
        of.rhs.tiles = {tile, 1};
        if (!harness.Begin(of.Text() + " as " + std::string(NameOf(list.dtype)))) continue;
        Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        Array narrow(list.dtype, of.rhs.ScaleShape());
        FillFrom(narrow, list.some, harness.random());
        operands.rhs_scale = As(DType::kF32, narrow);
        const Outputs expected = CheckedResults(harness, of, operands);
        of.rhs.scale_type = list.dtype;
        operands.rhs_scale = std::move(narrow);
        ExpectSame(harness, of, operands, expected);
      }
    }
  }
}

// Of single values, of blocks and of columns: the same bits as with int32.
CLAIM(ZeroPointsMayBeBytes) {
  for (DType dtype : {DType::kS8, DType::kU8}) {
    for (int64_t rows : {1, 33}) {
      for (int64_t tile : {1, 100, 200}) {
        Case of = Matrices(dtype, dtype, {rows, 200, 70}, kAcross);
        of.lhs.scale = of.rhs.scale = of.lhs.zero_point = of.rhs.zero_point = true;
        of.lhs.tiles = {1, 200}, of.rhs.tiles = {tile, 1};
        if (!harness.Begin(of.Text())) continue;
        Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        const Outputs expected = CheckedResults(harness, of, operands);
        operands.lhs_zero_point = As(dtype, operands.lhs_zero_point);
        of.lhs.zero_type = dtype;
        ExpectSame(harness, of, operands, expected);
        operands.rhs_zero_point = As(dtype, operands.rhs_zero_point);
        of.rhs.zero_type = dtype;
        ExpectSame(harness, of, operands, expected);
      }
    }
  }
}

}  // namespace jaxfp8::tests
