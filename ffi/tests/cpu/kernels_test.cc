// Every kernel against the reference: all codes, sizes around every border, layouts, scales, zero
// points, epilogues, and problems of any form.
//
//   kernels [--kernels PREFIX,PREFIX...] [--without PREFIX,PREFIX...] [--how WORDS]
//           [--random COUNT] [--seed NUMBER]
//
// Says of each kernel compiled in whether this machine runs it.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>

#include "cpu/features.h"
#include "cpu/route.h"
#include "cpu/scratch.h"
#include "tests/cpu/draw.h"
#include "tests/cpu/plan_of.h"
#include "tests/cpu/reference.h"

namespace jaxfp8::tests {
namespace {

constexpr int kMostReported = 20;
// The first bytes of a thread's scratch: what a kernel leaves out of its panels is NaN, or 255.
constexpr int64_t kSoiledBytes = 96 << 10;

struct Options {
  std::string kernels, without, how;
  int64_t random = 600;
  uint64_t seed = 1;
};

// Whether a kernel can compute a case at all, by the rules of docs/custom_call.md.
bool Takes(const std::string& kernel, const Case& of) {
  if (kernel.ends_with("_int8") || kernel.ends_with("_vnni")) {
    return IsInt8(of.lhs.dtype) && IsInt8(of.rhs.dtype);
  }
  if (of.out_dtype == DType::kS32) return false;
  if (!kernel.ends_with("_bf16")) return true;
  for (const SideCase* side : {&of.lhs, &of.rhs}) {
    const bool fits = side->dtype == DType::kBF16 || IsEightBit(side->dtype);
    if (!fits || side->zero_point) return false;
  }
  return true;
}

void SoilScratch() {
  Scratch& scratch = Scratch::OfThread();
  scratch.Reserve(kSoiledBytes);
  std::memset(scratch.Take<uint8_t>(kSoiledBytes), 0xff, kSoiledBytes);
}

// Whether a name begins with one of the prefixes.
bool Named(const std::string& prefixes, const std::string& name) {
  std::istringstream all(prefixes);
  for (std::string prefix; std::getline(all, prefix, ',');) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

bool Wanted(const Options& options, const std::string& name) {
  const bool named = options.kernels.empty() || Named(options.kernels, name);
  return named && !Named(options.without, name);
}

class Checks {
 public:
  explicit Checks(const Options& options) : options_(options) {
    for (const Kernel* kernel : AllKernels()) {
      const std::string name = kernel->name;
      if (!Wanted(options, name)) continue;
      if (kernel->needs & ~CpuFeatures()) {
        absent_.push_back(name);
      } else {
        cases_[name] = 0;
      }
    }
  }

  void Check(const Case& of, const Operands& operands) {
    const Exact exact = Compute(of, operands);
    for (auto& [kernel, cases] : cases_) {
      const std::string wrong = Run(of, operands, exact, kernel);
      if (!wrong.empty() && ++failures_ <= kMostReported) {
        std::printf("FAILED: %s: %s: %s\n", kernel.c_str(), of.Text().c_str(), wrong.c_str());
      }
      cases += Takes(kernel, of);
    }
  }

  void Check(const Case& of, Values values = Values::kFinite) {
    Check(of, DrawOperands(of, values, random()));
  }

  void Expect(bool holds, const std::string& claim) {
    if (!holds && ++failures_ <= kMostReported) std::printf("FAILED: %s\n", claim.c_str());
  }

  bool Has(const std::string& kernel) const { return cases_.contains(kernel); }
  Random& random() { return random_; }
  const Options& options() const { return options_; }

  int Report() const {
    for (const auto& [kernel, cases] : cases_) {
      std::printf("  %-14s %s, %lld cases\n", kernel.c_str(), options_.how.c_str(),
                  static_cast<long long>(cases));
    }
    for (const std::string& kernel : absent_) {
      std::printf("  %-14s not run: this CPU lacks its instructions (it has: %s)\n", kernel.c_str(),
                  CpuFeatureNames());
    }
    const bool none = cases_.empty() && absent_.empty();
    if (none) std::printf("FAILED: no kernel has such a name\n");
    std::printf("  %d failures\n", failures_);
    return none || failures_ != 0;
  }

 private:
  std::string Run(const Case& of, const Operands& operands, const Exact& exact,
                  const std::string& kernel) {
    const Results results = SoiledResults(of);
    SoilScratch();
    std::string message;
    const int status = Call(of, operands, results, kernel.c_str(), 1, message);
    if (!Takes(kernel, of)) return status == JAXFP8_INVALID_ARGUMENT ? "" : "is not refused";
    if (status != JAXFP8_OK) return "is refused: " + message;
    return WhyWrong(of, exact, results);
  }

  const Options options_;
  Random random_{options_.seed};
  std::map<std::string, int64_t> cases_;
  std::vector<std::string> absent_;
  int failures_ = 0;
};

// All 256 codes of a type against ones of another, a depth of 1: NaN and infinities included.
void CheckCodesAcross(Checks& checks, DType coded, DType other, int layout, bool left) {
  for (int64_t lines : {1, 5}) {
    Case of = left ? Matrices(coded, other, {256, 1, lines}, layout)
                   : Matrices(other, coded, {lines, 1, 256}, layout);
    Operands operands = DrawOperands(of, Values::kFinite, checks.random());
    FillWithCodes(left ? operands.lhs : operands.rhs, false);
    const Array& ones = left ? operands.rhs : operands.lhs;
    for (int64_t i = 0; i < ones.count(); ++i) Put(ones, i, 1.0);
    checks.Check(of, operands);
  }
}

// Finite codes along the depth against the identity: each takes every place in a vector.
void CheckCodesAlong(Checks& checks, DType coded, DType other, int layout, bool left) {
  Case of = left ? Matrices(coded, other, {2, 256, 256}, layout)
                 : Matrices(other, coded, {256, 256, 2}, layout);
  Operands operands = DrawOperands(of, Values::kFinite, checks.random());
  FillWithCodes(left ? operands.lhs : operands.rhs, true);
  const Array& identity = left ? operands.rhs : operands.lhs;
  for (int64_t i = 0; i < identity.count(); ++i) Put(identity, i, i / 256 == i % 256 ? 1.0 : 0.0);
  checks.Check(of, operands);
}

void CheckCodes(Checks& checks) {
  for (auto [lhs, rhs] : TypePairs()) {
    for (int layout = 0; layout < kLayouts; ++layout) {
      for (bool left : {true, false}) {
        const DType coded = left ? lhs : rhs, other = left ? rhs : lhs;
        if (!IsEightBit(coded)) continue;
        CheckCodesAcross(checks, coded, other, layout, left);
        CheckCodesAlong(checks, coded, other, layout, left);
      }
    }
  }
}

// Sizes at and around the borders of vectors, register tiles, groups of depth and slabs of rows.
constexpr Sizes kSizes[] = {
    {0, 5, 7},    {5, 0, 7},     {5, 7, 0},    {0, 0, 0},    {1, 1, 1},    {1, 1, 64},
    {1, 64, 1},   {1, 129, 130}, {2, 3, 65},   {3, 64, 64},  {4, 17, 63},  {4, 128, 64},
    {4, 257, 65}, {5, 65, 17},   {6, 16, 64},  {7, 31, 66},  {8, 32, 128}, {12, 48, 16},
    {13, 2, 15},  {16, 66, 67},  {17, 17, 17}, {17, 33, 49}, {33, 5, 47},  {48, 20, 50},
    {49, 40, 51}, {64, 64, 64},  {65, 4, 3},   {70, 3, 71},  {1, 600, 3},  {3, 513, 33},
};

void CheckSizes(Checks& checks) {
  int turn = 0;
  for (auto [lhs, rhs] : TypePairs()) {
    for (const Sizes& sizes : kSizes) {
      ++turn;
      for (int layout = 0; layout < kLayouts; ++layout) {
        Case of = Matrices(lhs, rhs, sizes, layout);
        if (layout == turn % kLayouts) checks.Check(of, Values::kSpecial);
        DrawFactors(of, checks.random());
        DrawEpilogue(of, checks.random());
        checks.Check(of);
      }
    }
  }
}

// Prepared columns: all codes, sizes around the borders, and scales along either axis, of which
// some part quads.
void CheckPrepared(Checks& checks) {
  constexpr Sizes kWhole[] = {{1, 4, 64},    {2, 64, 128}, {3, 260, 64}, {4, 512, 64},
                              {5, 12, 192},  {9, 64, 64},  {17, 68, 64}, {33, 192, 128},
                              {70, 128, 64}, {200, 8, 320}};
  for (auto [lhs, rhs] : TypePairs()) {
    if (!IsEightBit(rhs)) continue;
    Case codes = Prepared(lhs, rhs, {256, 256, 64});
    Operands operands = DrawOperands(codes, Values::kFinite, checks.random());
    FillWithCodes(operands.rhs, true);
    for (int64_t i = 0; i < operands.lhs.count(); ++i) {
      Put(operands.lhs, i, i / 256 == i % 256 ? 1.0 : 0.0);
    }
    checks.Check(codes, operands);
    for (const Sizes& sizes : kWhole) {
      Case of = Prepared(lhs, rhs, sizes);
      checks.Check(of, Values::kSpecial);
      DrawFactors(of, checks.random());
      DrawEpilogue(of, checks.random());
      checks.Check(of);
    }
  }
  for (const Sizes& sizes : {Sizes{2, 4352, 64}, Sizes{6, 8260, 64}, Sizes{300, 4352, 64}}) {
    checks.Check(Prepared(DType::kBF16, DType::kE5M2, sizes));
    checks.Check(Prepared(DType::kU8, DType::kS8, sizes));
  }
}

// More depth than one block, more rows than one panel, more columns than one share.
void CheckLargeSizes(Checks& checks) {
  constexpr Sizes kLarge[] = {{1, 9001, 65},    {4, 4097, 64},   {5, 4200, 66},
                              {23, 3100, 67},   {33, 300, 35},   {64, 520, 100},
                              {100, 1000, 110}, {128, 1100, 70}, {300, 40, 310}};
  constexpr std::pair<DType, DType> kTypes[] = {{DType::kBF16, DType::kE4M3},
                                                {DType::kU8, DType::kS8}};
  for (auto [lhs, rhs] : kTypes) {
    for (const Sizes& sizes : kLarge) {
      for (int layout = 0; layout < kLayouts; ++layout) {
        Case of = Matrices(lhs, rhs, sizes, layout);
        checks.Check(of);
        of.rhs.tiles = {100, 1};
        of.rhs.scale = true;
        of.lhs.zero_point = of.rhs.zero_point = IsInt8(lhs);
        checks.Check(of);
      }
    }
  }
}

// Scales from 1/4 to 3/4, of which float sums of chunks may be added in float32.
void DrawModerateScales(const Operands& operands) {
  for (const Array* scale : {&operands.lhs_scale, &operands.rhs_scale}) {
    for (int64_t i = 0; i < scale->count(); ++i) Put(*scale, i, 0.25 + i * 37 % 64 / 128.0);
  }
}

// Several tiles of rows times columns along the depth whose chunks are as long as that takes; a
// scale for each row, or for its chunks.
void CheckRowsAlong(Checks& checks) {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kBF16, DType::kE4M3}, {DType::kS8, DType::kS8}, {DType::kU8, DType::kS8}};
  for (auto [lhs, rhs] : kTypes) {
    for (const Sizes& sizes : {Sizes{20, 768, 33}, Sizes{40, 1152, 41}, Sizes{100, 2688, 70}}) {
      Case of = Matrices(lhs, rhs, sizes, 2);
      of.lhs.scale = of.rhs.scale = true;
      const int64_t tile = lhs == DType::kS8 ? 128 : sizes.depth / 3;
      of.rhs.tiles = {1, tile};
      for (const int64_t depth : {sizes.depth, tile}) {
        of.lhs.tiles = {1, depth};
        of.lhs.zero_point = of.rhs.zero_point = lhs == DType::kU8;
        const Operands operands = DrawOperands(of, Values::kFinite, checks.random());
        DrawModerateScales(operands);
        checks.Check(of, operands);
      }
    }
  }
}

// A shape that broadcasts to [rows, columns]: full, one row, one column or one value.
Shape Broadcast(int64_t rows, int64_t columns, int kind) {
  return {kind & 1 ? 1 : rows, kind & 2 ? 1 : columns};
}

// Every output type with every activation, residual type and form of the planes.
void CheckEpilogues(Checks& checks) {
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
          checks.Check(of);
        }
      }
    }
  }
}

// Sums from 1e-30 to 1e30 through every branch of the activations.
void CheckActivations(Checks& checks) {
  for (const char* activation : kActivations) {
    Case of = Matrices(DType::kS8, DType::kS8, {2, 4, 200}, 0);
    of.activation = activation;
    of.rhs.tiles = {4, 1};
    of.rhs.scale = true;
    const Operands operands = DrawOperands(of, Values::kFinite, checks.random());
    for (int i = 0; i < 200; ++i) Put(operands.rhs_scale, i, std::pow(10, -30 + 60 * i / 199.0));
    checks.Check(of, operands);
  }
}

// Which products are left unpacked for the tiles of AMX, which results hardly show.
void CheckCuts(Checks& checks) {
  const auto expect = [&](const char* kernel, const char* lhs, const char* rhs, const Sizes& sizes,
                          bool along, bool gemv, int64_t scaled = 0) {
    if (!checks.Has(kernel)) return;
    const Plan plan = PlanOf(kernel, lhs, rhs, 1, sizes, 1, along, scaled);
    checks.Expect(plan.gemv == gemv,
                  std::string(kernel) + " cuts otherwise for " + std::to_string(sizes.rows) +
                      (along ? " rows along " : " rows across ") + std::to_string(sizes.depth) +
                      " scaled by " + std::to_string(scaled));
  };
  const auto bf16 = [&](auto... all) { expect("amx_bf16", "bfloat16", "float8_e4m3fn", all...); };
  const auto int8 = [&](auto... all) { expect("amx_int8", "int8", "int8", all...); };
  bf16(Sizes{8, 512, 256}, false, true);
  bf16(Sizes{9, 512, 256}, false, false);
  int8(Sizes{5, 512, 256}, false, false);
  // Along the depth the most rows: of any depth, and with enough of each chunk for each.
  constexpr struct {
    int64_t depth, scaled, most;
  } kAlong[] = {{16, 0, 32},    {512, 0, 128},   {4096, 0, 128},   {57344, 0, 128},
                {4096, 64, 64}, {4096, 100, 99}, {4096, 128, 128}, {4096, 512, 128}};
  for (const auto& [depth, scaled, most] : kAlong) {
    for (const int more : {0, 1}) {
      bf16(Sizes{most + more, depth, 256}, true, !more, scaled);
      int8(Sizes{most + more, depth, 256}, true, !more, scaled);
    }
  }
}

void CheckRandom(Checks& checks) {
  for (int64_t i = 0; i < checks.options().random; ++i) {
    const Case of = DrawCase(checks.random());
    checks.Check(of, i % 4 ? Values::kFinite : Values::kSpecial);
  }
}

Options Read(int count, char** arguments) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    if (name == "--kernels") options.kernels = arguments[i + 1];
    if (name == "--without") options.without = arguments[i + 1];
    if (name == "--how") options.how = arguments[i + 1];
    if (name == "--random") options.random = std::atoll(arguments[i + 1]);
    if (name == "--seed") options.seed = std::strtoull(arguments[i + 1], nullptr, 10);
  }
  return options;
}

}  // namespace
}  // namespace jaxfp8::tests

// Wide gaps between allocations: a whole vector read behind one still falls into its gap.
extern "C" const char* __asan_default_options() { return "redzone=512"; }

int main(int count, char** arguments) {
  using namespace jaxfp8::tests;
  Checks checks(Read(count, arguments));
  CheckCodes(checks);
  CheckSizes(checks);
  CheckPrepared(checks);
  CheckLargeSizes(checks);
  CheckRowsAlong(checks);
  CheckEpilogues(checks);
  CheckActivations(checks);
  CheckCuts(checks);
  CheckRandom(checks);
  return checks.Report();
}
