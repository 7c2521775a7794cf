// What brings a matrix to 8 bits, on every instruction set: the bits of float32 arithmetic, each
// operation rounded once.
//
//   quantize [--share N]
//
// With a share, one in so many of the values is tried.

#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "cpu/pool.h"
#include "tests/cpu/formats.h"
#include "tests/cpu/operands.h"
#include "tests/expect.h"

namespace jaxfp8::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kIn[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr DType kOut[] = {DType::kE4M3, DType::kE5M2, DType::kS8};
constexpr int64_t kWhole = int64_t{1} << 40;  // a tile larger than any matrix

int64_t share = 1;

float HighestCode(DType out) {
  return static_cast<float>(out == DType::kS8 ? 127 : HighestOf(out));
}

// The least power of two not below a scale. One that is an ulp below the scale counts.
float PowerAbove(float scale) {
  int exponent = 0;
  std::frexp(scale / (1 + 0x1.8p-23), &exponent);
  return std::ldexp(1.0f, exponent);
}

float ExpectedScale(const QuantizeProblem& problem, float amax) {
  const float scale = amax * (1.0f / HighestCode(problem.out));
  const float chosen = problem.power_of_two ? PowerAbove(scale) : scale;
  return scale > 0 ? std::max(chosen, std::numeric_limits<float>::min()) : 1.0f;
}

// The code of a quotient; NaN has several.
uint8_t ExpectedCode(const QuantizeProblem& problem, float quotient) {
  if (problem.out == DType::kS8) {
    const double rounded = std::isnan(quotient) ? 0 : RoundedTo(DType::kS8, quotient);
    return static_cast<uint8_t>(
        static_cast<int8_t>(std::max(rounded, static_cast<double>(problem.lowest))));
  }
  if (std::isnan(quotient)) return 0x7f;
  const Array code(problem.out, {1});
  Put(code, 0, std::copysign(RoundedTo(problem.out, quotient), quotient));
  return code.data()[0];
}

struct Quantized {
  Array codes, scale, amax;
};

Quantized Expected(const QuantizeProblem& problem, const Array& x, float given) {
  const Shape tiles = {problem.tiles_down(), problem.tiles_across()};
  Quantized to{{problem.out, {x.count()}}, {DType::kF32, tiles}, {DType::kF32, tiles}};
  const auto tile_of = [&](int64_t i) {
    return i / problem.columns / problem.tile_rows * problem.tiles_across() +
           i % problem.columns / problem.tile_columns;
  };
  Fill(to.amax, 0);
  for (int64_t i = 0; i < x.count(); ++i) {
    const auto magnitude = static_cast<float>(std::abs(ValueOf(x, i)));
    float& amax = to.amax.as<float>()[tile_of(i)];
    if (std::isfinite(magnitude)) amax = std::max(amax, magnitude);
  }
  for (int64_t i = 0; i < to.scale.count(); ++i) {
    const float chosen = ExpectedScale(problem, to.amax.as<float>()[i]);
    to.scale.as<float>()[i] = problem.given_scale ? given : chosen;
  }
  for (int64_t i = 0; i < x.count(); ++i) {
    float scale = to.scale.as<float>()[tile_of(i)];
    if (scale == 0 && !problem.plain) scale = 1;
    const auto value = static_cast<float>(ValueOf(x, i));
    const float steps = problem.multiplies ? value * scale : value / scale;
    to.codes.data()[i] = ExpectedCode(problem, steps);
  }
  return to;
}

std::string NameOf(const QuantizeProblem& problem, const char* set, float given) {
  std::string name = std::string(set) + ": " + std::string(jaxfp8::NameOf(problem.in)) + " [" +
                     std::to_string(problem.rows) + "," + std::to_string(problem.columns) +
                     "] to " + std::string(jaxfp8::NameOf(problem.out)) + ", tiles [" +
                     std::to_string(problem.tile_rows) + "," +
                     std::to_string(problem.tile_columns) + "]";
  if (problem.given_scale) name += ", scale " + std::to_string(given);
  if (problem.power_of_two) name += ", powers of two";
  return name;
}

// On every instruction set, compared with one reference.
void Check(const char* claim, const QuantizeProblem& problem, const Array& x, float given = 1,
           int threads = 1) {
  const Quantized exact = Expected(problem, x, given);
  for (const char* set : {"avx512", "avx2", "scalar"}) {
    if (!QuantizeWhyNot(problem, set).ok()) continue;
    const Quantized found{{problem.out, {x.count()}},
                          {DType::kF32, {exact.scale.count()}},
                          {DType::kF32, {exact.amax.count()}}};
    Fill(found.scale, given);
    QuantizeBuffers buffers;
    buffers.x = x.data(), buffers.codes = found.codes.data();
    buffers.scale = found.scale.as<float>();
    buffers.amax = problem.amax ? found.amax.as<float>() : nullptr;
    OwnThreads pool(threads);
    Quantize(problem, buffers, set, pool);
    const std::string name = claim + (": " + NameOf(problem, set, given));
    Expect(SameValues(found.codes, exact.codes), name + ": other codes");
    Expect(SameValues(found.scale, exact.scale), name + ": other scales");
    Expect(!problem.amax || SameValues(found.amax, exact.amax), name + ": other amaxes");
  }
}

// All values of a 16-bit type, as a row; of float32 two of each upper half.
Array EveryValue(DType in) {
  const int64_t count = (in == DType::kF32 ? 2 << 16 : 1 << 16) / share;
  Array to(in, {count});
  for (int64_t i = 0; i < count; ++i) {
    const auto code = static_cast<uint32_t>(i * share);
    if (in == DType::kF32) {
      to.as<uint32_t>()[i] = code / 2 << 16 | (code % 2 ? 0x8001u : 0u);
    } else {
      to.as<uint16_t>()[i] = static_cast<uint16_t>(code);
    }
  }
  return to;
}

QuantizeProblem RowOf(const Array& x, DType out, bool given) {
  QuantizeProblem problem;
  problem.rows = 1, problem.columns = x.count();
  problem.tile_rows = problem.tile_columns = kWhole;
  problem.in = x.dtype(), problem.out = out;
  problem.given_scale = given;
  return problem;
}

void EveryValueByAGivenScale() {
  for (DType in : kIn) {
    const Array x = EveryValue(in);
    for (DType out : kOut) {
      for (float scale : {1.0f, 0.3f, 0.0f, -0.7f, 1e-40f, 1e38f, kInfinity}) {
        Check("every value by a given scale", RowOf(x, out, true), x, scale);
      }
    }
  }
}

void APlainDivisionByZeroAndALowestCode() {
  const Array x = EveryValue(DType::kBF16);
  for (DType out : kOut) {
    for (auto [scale, lowest] : {std::pair(0.0f, -128), std::pair(-0.0f, -128),
                                 std::pair(0.25f, -127), std::pair(0.25f, 0)}) {
      QuantizeProblem problem = RowOf(x, out, true);
      problem.plain = true;
      problem.lowest = lowest;
      Check("a plain division by zero and a lowest code", problem, x, scale);
    }
  }
}

void ValuesTimesAFactor() {
  const Array x = EveryValue(DType::kBF16);
  for (DType out : kOut) {
    for (float factor : {0.3f, 0.0f, -7.0f, 1e-40f, 1e38f, kInfinity}) {
      QuantizeProblem problem = RowOf(x, out, true);
      problem.plain = problem.multiplies = true;
      Check("values times a factor", problem, x, factor);
    }
  }
}

// Halfway between two codes, and the two float32 on either side.
void TiesGoToTheEvenCodeAndNeighboursToTheirOwn() {
  for (DType out : kOut) {
    std::vector<float> borders;
    std::vector<double> codes;
    for (int code = 0; code < 128; ++code) {
      const double value = DecodedCode(out, static_cast<uint8_t>(code));
      if (std::isfinite(value)) codes.push_back(value);
    }
    for (size_t i = 1; i < codes.size(); ++i) {
      const auto half = static_cast<float>((codes[i - 1] + codes[i]) / 2);
      int32_t bits;
      std::memcpy(&bits, &half, sizeof bits);
      for (int32_t near = bits - 2; near <= bits + 2; ++near) {
        float value;
        std::memcpy(&value, &near, sizeof value);
        borders.insert(borders.end(), {value, -value});
      }
    }
    Random random(0);
    for (int turn = 0; turn < 50; ++turn) {
      const float scale = turn ? std::exp2(0.01f * static_cast<float>(Below(random, 400))) : 1.0f;
      const Array x(DType::kF32, {static_cast<int64_t>(borders.size())});
      for (size_t i = 0; i < borders.size(); ++i) x.as<float>()[i] = borders[i] * scale;
      Check("ties go to the even code", RowOf(x, out, true), x, scale);
    }
  }
}

// Rows of different magnitude, with zeros, and with what is not finite if `special`.
Array Values(DType in, int64_t rows, int64_t columns, bool special) {
  Random random(static_cast<uint64_t>(rows * columns));
  Array x(in, {rows, columns});
  double magnitude = 1;
  for (int64_t i = 0; i < x.count(); ++i) {
    if (i % columns == 0) magnitude = std::exp2(static_cast<double>(Below(random, 20)) - 10);
    const double value = (static_cast<double>(Below(random, 2001)) - 1000) / 300;
    Put(x, i, i % (x.count() / 5 + 1) ? value * magnitude : 0.0);
  }
  if (!special || x.count() < 4000) return x;
  const double kTiny = in == DType::kF32 ? 0x1p-149 : in == DType::kBF16 ? 0x1p-133 : 0x1p-24;
  const auto fill = [&](int64_t row, double value) {
    for (int64_t i = 0; i < columns; ++i) Put(x, row * columns + i, value);
  };
  Put(x, 0, NAN), Put(x, columns + 1, kInfinity), Put(x, 2 * columns + 2, -kInfinity);
  Put(x, 4 * columns - 1, -NAN), Put(x, x.count() - 1, kInfinity);
  fill(5, 0), fill(6, kTiny), fill(7, -0.0), fill(8, NAN), fill(9, 0), fill(10, HighestOf(in));
  Put(x, 9 * columns + 7, kTiny);
  return x;
}

void CodesScalesAndAmaxesOfAnyTiles() {
  constexpr std::pair<int64_t, int64_t> kTiles[] = {
      {kWhole, kWhole}, {1, kWhole}, {1, 128}, {128, 128}, {1, 32}, {3, 5}, {7, kWhole}};
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1},     {3, 5},     {1, 31},   {2, 33},
                                                     {130, 256}, {200, 130}, {17, 1027}};
  int64_t turn = 0;
  for (DType in : kIn) {
    for (auto [rows, columns] : kShapes) {
      for (bool special : {false, true}) {
        const Array x = Values(in, rows, columns, special);
        for (DType out : kOut) {
          for (auto [tile_rows, tile_columns] : kTiles) {
            if (rows * columns > 10'000 && ++turn % share) continue;
            QuantizeProblem problem = RowOf(x, out, false);
            problem.rows = rows, problem.columns = columns;
            problem.tile_rows = tile_rows, problem.tile_columns = tile_columns;
            problem.amax = true;
            Check("codes, scales and amaxes of any tiles", problem, x);
            problem.power_of_two = true;
            Check("codes, scales and amaxes of any tiles", problem, x);
            problem.power_of_two = false, problem.given_scale = true;
            Check("amaxes beside a given scale", problem, x, 0.3f);
          }
        }
      }
    }
  }
}

// Amaxes around each power of two times the highest code, down to the smallest numbers.
void PowersOfTwoAreTheNextOnesUp() {
  for (DType out : kOut) {
    std::vector<float> amaxes = {0x1p-149f, 0x1p-140f, 0x1p-126f,
                                 std::numeric_limits<float>::max()};
    for (int power = -126; power < 119; ++power) {
      const float exact = std::ldexp(HighestCode(out), power);
      if (!std::isfinite(exact)) continue;
      for (int ulps = -3; ulps <= 3; ++ulps) {
        int32_t bits;
        std::memcpy(&bits, &exact, sizeof bits);
        bits += ulps;
        std::memcpy(&amaxes.emplace_back(), &bits, sizeof bits);
      }
    }
    const auto rows = static_cast<int64_t>(amaxes.size());
    const Array x(DType::kF32, {rows, 2});
    for (int64_t row = 0; row < rows; ++row) {
      x.as<float>()[2 * row] = -amaxes[row], x.as<float>()[2 * row + 1] = amaxes[row] / 3;
    }
    QuantizeProblem problem = RowOf(x, out, false);
    problem.rows = rows, problem.columns = 2, problem.tile_rows = 1;
    problem.power_of_two = true;
    Check("powers of two are the next ones up", problem, x);
  }
}

void ArraysThatThreadsShare() {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1 << 20}, {1024, 1025}, {3, 400'001}};
  for (auto [rows, columns] : kShapes) {
    if (share > 1 && rows != 3) continue;
    const Array x = Values(DType::kBF16, rows, columns, false);
    for (auto [tile_rows, tile_columns] : {std::pair(kWhole, kWhole), std::pair(int64_t{1}, kWhole),
                                           std::pair<int64_t, int64_t>(128, 128)}) {
      QuantizeProblem problem = RowOf(x, DType::kS8, false);
      problem.rows = rows, problem.columns = columns;
      problem.tile_rows = tile_rows, problem.tile_columns = tile_columns;
      problem.amax = true;
      Check("arrays that threads share", problem, x, 1, 4);
    }
  }
}

void TheAmaxOfARowIsNaNBeforeInfinityBeforeNumbers() {
  for (DType in : kIn) {
    for (auto [rows, columns] : {std::pair<int64_t, int64_t>(1, 1), {5, 33}, {30, 4100}, {3, 0}}) {
      const Array x = Values(in, rows, columns, true);
      const Array amax(DType::kF32, {rows}), exact(DType::kF32, {rows});
      OwnThreads pool(2);
      FindRowAmax(x.data(), in, rows, columns, amax.as<float>(), pool);
      Fill(exact, 0);
      for (int64_t i = 0; i < x.count(); ++i) {
        float& seen = exact.as<float>()[i / columns];
        const auto magnitude = static_cast<float>(std::abs(ValueOf(x, i)));
        if (!std::isnan(seen) && !(magnitude <= seen)) seen = magnitude;
      }
      Expect(SameValues(amax, exact), "the amax of a row is NaN before infinity before numbers");
    }
  }
}

}  // namespace
}  // namespace jaxfp8::tests

int main(int count, char** arguments) {
  using namespace jaxfp8::tests;
  if (count == 3 && arguments[1] == std::string("--share")) share = std::atoll(arguments[2]);
  EveryValueByAGivenScale();
  APlainDivisionByZeroAndALowestCode();
  ValuesTimesAFactor();
  TiesGoToTheEvenCodeAndNeighboursToTheirOwn();
  CodesScalesAndAmaxesOfAnyTiles();
  PowersOfTwoAreTheNextOnesUp();
  ArraysThatThreadsShare();
  TheAmaxOfARowIsNaNBeforeInfinityBeforeNumbers();
  return Report("quantize");
}
