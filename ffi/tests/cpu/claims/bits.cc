// Bits of a result do not depend on threads, on where a row or column lies, nor on how many rows
// there are where docs/cpu_kernels.md says so.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/cpu/draw.h"
#include "tests/cpu/harness.h"

namespace jaxfp8::tests {
namespace {

constexpr std::pair<DType, DType> kTypes[] = {{DType::kS8, DType::kS8},
                                              {DType::kBF16, DType::kE4M3}};

struct Part {
  Case of;
  Operands operands;
};

// The last rows of a product of two matrices, the left one [M, K], as a product of their own.
Part LastRows(const Case& whole, const Operands& from, int64_t rows) {
  Part part{whole, {}};
  SideCase& lhs = part.of.lhs;
  const bool scale_per_row = lhs.tiles[0] == 1;
  lhs.shape[0] = rows;
  lhs.tiles[0] = scale_per_row ? 1 : rows;
  const int64_t factors = CountOf(lhs.ScaleShape());
  part.operands.lhs = from.lhs.Last(CountOf(lhs.shape));
  if (lhs.scale) part.operands.lhs_scale = from.lhs_scale.Last(factors);
  if (lhs.zero_point) part.operands.lhs_zero_point = from.lhs_zero_point.Last(factors);
  part.operands.rhs = from.rhs.Copy();
  part.operands.rhs_scale = from.rhs_scale.Copy();
  part.operands.rhs_zero_point = from.rhs_zero_point.Copy();
  return part;
}

// The last elements of what was computed: a row depends on no other.
Exact LastOf(const Exact& whole, int64_t count) {
  const auto last = [count](const std::vector<double>& all) {
    return std::vector<double>(all.end() - count, all.end());
  };
  return {last(whole.y), last(whole.error), last(whole.out_scale)};
}

// Whether the kernel promises the bits of the whole for so many rows of it.
using Promise = std::function<bool(const TestedKernel&, int64_t rows)>;

bool Always(const TestedKernel&, int64_t) { return true; }

// Holds the whole and each part of it against the bound, and bits of the parts against the whole.
void CheckParts(Harness& harness, const Case& of, const Operands& operands, const Shape& counts,
                Promise promise) {
  const Exact exact_whole = Compute(of, operands);
  std::vector<Part> parts;
  std::vector<Exact> exact;
  for (int64_t count : counts) {
    if (count >= of.lhs.shape[0]) continue;
    parts.push_back(LastRows(of, operands, count));
    exact.push_back(LastOf(exact_whole, CountOf(parts.back().of.OutShape())));
  }
  harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& whole) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t rows = parts[i].of.lhs.shape[0];
      const Results part = harness.Run(kernel, parts[i].of, parts[i].operands);
      const std::string wrong = WhyBeyondBound(parts[i].of, exact[i], part);
      harness.Expect(wrong.empty(), kernel, std::to_string(rows) + " rows of it: " + wrong);
      const bool same = SameValues(part.out, whole.out.Last(part.out.count()));
      harness.Expect(same || !promise(kernel, rows), kernel,
                     "other bits as the last " + std::to_string(rows) + " rows");
    }
    return WhyBeyondBound(of, exact_whole, whole);
  });
}

}  // namespace

CLAIM(BitsDoNotDependOnTheNumberOfThreads) {
  constexpr Sizes kSizes[] = {{1, 2000, 1200}, {65, 520, 530}, {300, 40, 600}};
  for (auto [lhs, rhs] : kTypes) {
    for (const Sizes& sizes : kSizes) {
      for (int layout : kWeightLayouts) {
        Case of = Matrices(lhs, rhs, sizes, layout);
        of.rhs.scale = true;
        of.amax = Shape{1, 1};
        if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& alone) {
          for (int threads : {2, 3}) {
            const Results shared = harness.Run(kernel, of, operands, threads);
            const bool same =
                SameValues(shared.out, alone.out) && SameValues(shared.amax, alone.amax);
            harness.Expect(same, kernel, "other bits on " + std::to_string(threads) + " threads");
          }
          return "";
        });
      }
    }
  }
}

// Equal rows and equal columns give equal results, wherever they lie in the tiles of a kernel.
CLAIM(BitsDoNotDependOnWhereARowOrAColumnIs) {
  constexpr int64_t k = 1024, same = 75, n = 2 * same;
  for (auto [lhs, rhs] : kTypes) {
    for (int64_t tile : {16, 128, 1024}) {
      for (int64_t rows : {3, 23, 64}) {
        Case of = Matrices(lhs, rhs, {rows, k, n}, kAcross);
        of.lhs.scale = of.rhs.scale = true;
        of.lhs.tiles = {1, tile}, of.rhs.tiles = {tile, 1};
        of.bias = {1, 1};
        if (!harness.Begin(of.Text())) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        MakeAtMostOne(operands.lhs_scale);  // so that float32 may hold the sums
        MakeAtMostOne(operands.rhs_scale);
        const int64_t row = operands.lhs.bytes() / rows, chunks = k / tile;
        for (int64_t i = row; i < rows * row; ++i) {
          operands.lhs.data()[i] = operands.lhs.data()[i - row];
        }
        for (int64_t i = chunks; i < rows * chunks; ++i) {
          Put(operands.lhs_scale, i, ValueOf(operands.lhs_scale, i - chunks));
        }
        for (int64_t i = 0; i < k * n; ++i) {
          if (i % n >= same) operands.rhs.data()[i] = operands.rhs.data()[i - same];
        }
        for (int64_t i = 0; i < chunks * n; ++i) {
          if (i % n >= same) Put(operands.rhs_scale, i, ValueOf(operands.rhs_scale, i - same));
        }
        const Exact exact = Compute(of, operands);
        harness.ForEachKernel(of, operands, [&](TestedKernel& kernel, const Results& results) {
          const float* out = results.out.as<float>();
          for (int64_t i = 0; i < rows * n; ++i) {
            const bool alike = out[i] == out[i % n] && out[i] == out[i - i % n + i % same];
            harness.Expect(alike, kernel, "other bits at out[" + std::to_string(i) + "]");
            if (!alike) break;
          }
          return WhyBeyondBound(of, exact, results);
        });
      }
    }
  }
}

// In a product of many rows. From 128 on, float kernels multiply short blocks of scales into the
// weight.
CLAIM(BitsOfARowDoNotDependOnHowManyOthersThereAre) {
  constexpr std::pair<DType, DType> kManyTypes[] = {
      {DType::kU8, DType::kS8}, {DType::kF32, DType::kE5M2}, {DType::kBF16, DType::kE5M2}};
  for (auto [lhs, rhs] : kManyTypes) {
    for (int64_t tile : {32, 128, 2100}) {
      Case of = Matrices(lhs, rhs, {tile == 32 ? 120 : 200, 2100, 70}, kAcross);
      of.rhs.scale = true;
      of.rhs.tiles = {tile, 1};
      if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      MakeAtMostOne(operands.rhs_scale);
      CheckParts(harness, of, operands, {17, 18, 22, 35, 64, 71, 119, 128, 129, 192, 193}, Always);
    }
  }
}

// In a GEMV, however many chunks of K it has. With short blocks over [N, K] fewer rows are a GEMV.
CLAIM(BitsOfARowDoNotDependOnHowManyFewThereAre) {
  constexpr struct {
    int64_t depth, tile;
    bool moderate;  // scales of at most 1, so that float32 may hold the sums of floats
    int64_t along;  // most rows of a GEMV over [N, K] by every kernel
  } kCuts[] = {{5003, 5003, false, 8}, {20'011, 20'011, false, 8}, {4480, 128, false, 4},
               {13'056, 192, true, 6}, {13'003, 200, true, 6},     {9024, 48, false, 2},
               {6144, 256, true, 8},   {24'576, 512, true, 8},     {30'720, 512, true, 8}};
  for (auto [lhs, weight] : kTypes) {
    const bool integers = IsInt8(lhs);
    for (const auto& cut : kCuts) {
      for (int layout : kWeightLayouts) {
        for (bool zero_point : {false, true}) {
          const int64_t most = layout == kAcross ? 4 : cut.along;
          Case of = Matrices(lhs, zero_point ? DType::kU8 : weight, {most, cut.depth, 70}, layout);
          of.lhs.scale = of.rhs.scale = true;
          of.lhs.tiles = {1, cut.depth}, of.rhs.tiles = WeightTiles(layout, cut.tile, 1);
          of.lhs.zero_point = zero_point && integers, of.rhs.zero_point = zero_point;
          if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
          const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
          if (cut.moderate && !integers) {
            MakeAtMostOne(operands.lhs_scale);
            MakeAtMostOne(operands.rhs_scale);
          }
          CheckParts(harness, of, operands, {1, 2, 3, 4, 7}, Always);
        }
      }
    }
  }
}

// AMX computes up to 8 rows over [K, N] as a GEMV, and up to 128 over [N, K]. AVX-512 VNNI computes
// up to 48 rows over [N, K] so where one scale holds for all of K, and AVX-512 BF16 8 in blocks of
// 192.
CLAIM(BitsOfARowDoNotDependOnHowManyRowsTilesTake) {
  constexpr const char* kAmx = "amx";
  constexpr const char* kAmxAndVnni = "amx,avx512_vnni";
  constexpr const char* kAmxAndBF16 = "amx,avx512_bf16";
  constexpr struct {
    int layout;
    int64_t depth, tile;
    int64_t floats, integers, shifted;  // rows; `shifted` those of integers with zero points
    const char* promised_by;
  } kCuts[] = {{kAlong, 5003, 5003, 48, 48, 48, kAmxAndVnni},
               {kAlong, 5003, 5003, 128, 128, 128, kAmx},
               {kAlong, 20'011, 20'011, 48, 48, 48, kAmxAndVnni},
               {kAlong, 20'011, 20'011, 128, 128, 128, kAmx},
               {kAlong, 13'056, 192, 8, 8, 8, kAmxAndBF16},
               {kAlong, 13'056, 192, 128, 128, 32, kAmx},
               {kAlong, 6144, 256, 128, 128, 32, kAmx},
               {kAlong, 24'576, 512, 128, 32, 32, kAmx},
               {kAlong, 30'720, 512, 128, 32, 32, kAmx},
               {kAlong, 4480, 128, 32, 32, 32, kAmx},
               {kAlong, 9024, 48, 32, 32, 32, kAmx},
               {kAlong, 13'003, 200, 32, 32, 32, kAmx},
               {kAcross, 5003, 5003, 8, 8, 8, kAmx},
               {kAcross, 20'011, 20'011, 8, 8, 8, kAmx},
               {kAcross, 13'056, 192, 8, 8, 8, kAmx},
               {kAcross, 6144, 256, 8, 8, 8, kAmx},
               {kAcross, 24'576, 512, 8, 8, 8, kAmx},
               {kAcross, 30'720, 512, 8, 8, 8, kAmx},
               {kAcross, 4480, 128, 8, 8, 8, kAmx},
               {kAcross, 9024, 48, 8, 8, 8, kAmx},
               {kAcross, 13'003, 200, 8, 8, 8, kAmx}};
  for (auto [lhs, rhs] : kTypes) {
    for (const auto& cut : kCuts) {
      for (const bool zero_point : {false, true}) {
        const bool integers = IsInt8(lhs);
        if (zero_point && !integers) continue;  // refused by the kernels that promise
        const int64_t rows = zero_point ? cut.shifted : integers ? cut.integers : cut.floats;
        Case of = Matrices(lhs, zero_point ? DType::kU8 : rhs, {rows, cut.depth, 70}, cut.layout);
        of.lhs.scale = of.rhs.scale = true;
        of.lhs.zero_point = of.rhs.zero_point = zero_point;
        of.lhs.tiles = {1, cut.depth}, of.rhs.tiles = WeightTiles(cut.layout, cut.tile, 1);
        if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
        const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
        if (!integers && cut.tile >= 192 && cut.tile < cut.depth) {
          MakeAtMostOne(operands.lhs_scale);
          MakeAtMostOne(operands.rhs_scale);
        }
        CheckParts(
            harness, of, operands, {1, 2, 3, 4, 7, 23, 41, 100},
            [&](const TestedKernel& kernel, int64_t) { return kernel.IsNamed(cut.promised_by); });
      }
    }
  }
}

// As many rows as tiles take. A part has the bits of the whole with AVX-512.
CLAIM(BitsOfFloatRowsDoNotDependOnHowManyThereAreAlongTheDepth) {
  constexpr std::pair<int64_t, int64_t> kCuts[] = {{5003, 5003}, {9024, 4512}, {3900, 1300}};
  for (auto [k, tile] : kCuts) {
    for (bool zero_point : {false, true}) {
      Case of = zero_point ? Matrices(DType::kF32, DType::kU8, {48, k, 67}, kAlong)
                           : Matrices(DType::kBF16, DType::kE5M2, {48, k, 67}, kAlong);
      of.lhs.scale = of.rhs.scale = true;
      of.lhs.tiles = of.rhs.tiles = {1, tile};
      of.rhs.zero_point = zero_point;
      if (!harness.Begin(of.Text(), Cost::kLarge)) continue;
      const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
      CheckParts(harness, of, operands, {12, 13, 18, 47}, [](const TestedKernel& kernel, int64_t) {
        return kernel.name.starts_with("avx512");
      });
    }
  }
}

// More rows than few times a weight [K, N]: the first of them pack it for those that follow.
CLAIM(BitsOfARowDoNotDependOnWhichRowsPackTheWeight) {
  constexpr struct {
    int64_t depth, columns, tile;
  } kWeights[] = {
      {5003, 70, 5003}, {4480, 128, 128}, {1300, 131, 50}, {8, 20, 8}, {301, 5000, 301}};
  for (DType lhs : {DType::kS8, DType::kU8, DType::kBF16}) {
    const bool integers = IsInt8(lhs);
    for (const auto& weight : kWeights) {
      for (int layout : kWeightLayouts) {
        for (bool zero_point : {false, true}) {
          const DType plain = integers ? DType::kS8 : DType::kE4M3;
          Case of = Matrices(lhs, zero_point ? DType::kU8 : plain,
                             {61, weight.depth, weight.columns}, layout);
          of.rhs.scale = true;
          of.rhs.tiles = WeightTiles(layout, weight.tile, 1);
          of.lhs.zero_point = zero_point && integers, of.rhs.zero_point = zero_point;
          const bool large = weight.depth * weight.columns > 100'000;
          if (!harness.Begin(of.Text(), large ? Cost::kLarge : Cost::kSmall)) continue;
          const Operands operands = DrawOperands(of, Values::kFinite, harness.random());
          CheckParts(
              harness, of, operands, {5, 6, 7, 8, 9, 10, 11, 12, 16, 19},
              layout == kAlong ? [](const TestedKernel&, int64_t) { return false; }
                               : [](const TestedKernel& kernel, int64_t rows) {
                                   return rows > 8 || kernel.name != "amx_bf16";
                                 });
        }
      }
    }
  }
}

}  // namespace jaxfp8::tests
