// Checks `sm90_gemm` on this machine's Hopper GPU against float64, then times its tile shapes.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -I ffi \
//     -o sm90_gemm_bench ffi/bench/sm90_gemm_bench.cu ffi/cuda/kernels/sm90_gemm/*.{cu,cc} \
//     ffi/cuda/kernels/{epilogue/epilogue,pack/pack}.cu ffi/cuda/{problem,error}.cc
//   ./sm90_gemm_bench [check|time|all]     all: times of every tile shape, not of the best ones
//   ./sm90_gemm_bench mixed [all]          the same of bfloat16 x e4m3 alone
//   ./sm90_gemm_bench TYPE M N K           one product of e4m3 or int8, for a profiler; mixed: of
//                                          bfloat16 x e4m3

#include <chrono>
#include <memory>

#include "bench/product_case.h"
#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"

namespace {

using sm90::Configuration;
using sm90::Pair;
using sm90::TileShape;

Device ThisDevice() {
  cudaDeviceProp properties;
  Must(cudaGetDeviceProperties(&properties, 0));
  Device device;
  device.compute_capability = 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = properties.sharedMemPerBlockOptin;
  std::printf("%s, %d multiprocessors\n", properties.name, device.multiprocessors);
  return device;
}

const char* NameOfPair(Pair pair) {
  return pair == Pair::kNone ? "-" : pair == Pair::kSharesLhs ? "lhs" : "rhs";
}

std::string NameOfConfiguration(const Configuration& c) {
  return std::to_string(c.tile.rows) + "x" + std::to_string(c.tile.columns) + " " +
         NameOfPair(c.pair);
}

std::vector<Configuration> Configurations(const Problem& problem) {
  std::vector<Configuration> all;
  for (const TileShape tile : sm90::TileShapesOf(sm90::WithWeightsOnLeft(problem))) {
    for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
      all.push_back({tile, pair});
    }
  }
  return all;
}

// ---------------------------------------------------------------------------------------- checks

// What the tensor cores cut off of the terms of an instruction, relative to the sum of magnitudes.
constexpr double kLost = 0x1p-10;

// Runs a case with every tile shape, twice, and compares.
//   shares  with a workspace, in which blocks can share units
void CheckCase(const Device& device, Case& c, bool shares = true) {
  c.Fill(), c.wanted.clear();
  c.lost = IsFloat8(c.p.lhs.dtype) ? kLost : 0;
  const double products = static_cast<double>(c.p.rows * c.p.columns * c.p.depth * c.p.batch);
  if (!c.p.amax && products > 1e7) c.every = 1 + static_cast<int64_t>(products / 1e7);
  const std::string name = c.name;
  for (const Configuration& configuration : Configurations(c.p)) {
    c.name = name + " " + NameOfConfiguration(configuration);
    const Memory workspace(shares ? size_t{64} << 20 : 0);
    std::string wrong = sm90::WhyNot(c.p, device);
    const auto plan = wrong.empty()
                          ? sm90::PlanWith(configuration, c.p, device, workspace.bytes, wrong)
                          : nullptr;
    Must(wrong);
    const auto launch = [&](const Buffers& given) {
      Buffers buffers = given;
      buffers.workspace = workspace.data, buffers.workspace_bytes = workspace.bytes;
      Must(plan->Run(buffers, nullptr));
    };
    c.Run(launch);
    std::vector<uint8_t> first;
    for (int i = 0; i < 2; ++i) {
      const Memory res(c.residual), bias(c.bias), scale(c.out_scale);
      const Memory out(c.p.batch * c.p.rows * c.p.columns * SizeOf(c.p.out.dtype));
      const Memory amax(c.p.amax ? CellsOf(c.p.amax, c.p.batch, c.p.rows, c.p.columns) * 4 : 0);
      launch(c.Bind(res, bias, scale, out, amax));
      const std::vector<uint8_t> bytes = out.Bytes();
      if (i == 0) first = bytes;
      Expect(bytes == first, c.name + ": the bits differ from run to run");
    }
  }
}

struct Shape {
  int64_t batch, rows, columns, depth;
};
struct Scales {
  int64_t lines, depth;
};

Case MakeCase(const char* name, DType lhs, DType rhs, const Shape& s, Scales lhs_scales,
              Scales rhs_scales, DType out, bool lhs_mn = false, bool rhs_mn = false) {
  TestSide l(lhs, s.batch, s.rows, s.depth, lhs_mn, true, false, lhs_scales.lines,
             lhs_scales.depth);
  TestSide r(rhs, s.batch, s.columns, s.depth, rhs_mn, true, false, rhs_scales.lines,
             rhs_scales.depth);
  Case c(name, s.batch, s.rows, s.columns, s.depth, std::move(l), std::move(r));
  c.p.out = MakePlane(out, s.batch, s.rows, s.columns, true, true, true);
  return c;
}

void CheckValues(const Device& device) {
  constexpr DType kE4 = DType::kE4M3, kE5 = DType::kE5M2, kBF = DType::kBF16;
  const Scales rows{1, 128}, blocks{128, 128};
  const auto check = [&](Case c) { CheckCase(device, c); };
  check(MakeCase("even", kE4, kE4, {1, 256, 384, 512}, rows, blocks, kBF));
  check(MakeCase("odd sizes", kE4, kE4, {1, 67, 131, 401}, rows, blocks, DType::kF32));
  check(MakeCase("one of each", kE4, kE4, {1, 1, 1, 1}, rows, blocks, DType::kF16));
  check(MakeCase("odd fours", kE4, kE5, {1, 301, 260, 1040}, rows, blocks, DType::kF16));
  check(MakeCase("e5m2", kE5, kE4, {1, 130, 200, 272}, rows, blocks, DType::kF32));
  check(MakeCase("e5m2 twice", kE5, kE5, {1, 129, 72, 144}, rows, rows, DType::kF32));
  check(MakeCase("lines", kE4, kE4, {1, 200, 333, 700}, rows, rows, kBF));
  check(MakeCase("squares", kE4, kE4, {1, 300, 270, 500}, blocks, blocks, kBF));
  check(MakeCase("deep tiles", kE4, kE4, {1, 140, 270, 900}, {3, 256}, {256, 384}, kBF));
  check(MakeCase("narrow tiles", kE4, kE4, {1, 140, 270, 900}, {1, 1024}, {5, 128}, kBF));
  check(MakeCase("batch", kE4, kE4, {3, 70, 100, 300}, rows, blocks, DType::kF32));
  check(
      MakeCase("transposed", kE4, kE4, {2, 130, 144, 200}, rows, blocks, DType::kF32, true, true));
  Case full = MakeCase("epilogue", kE4, kE4, {2, 150, 200, 256}, rows, blocks, kE4);
  full.p.residual = MakePlane(kBF, 2, 150, 200, true, true, true);
  full.p.bias = MakePlane(DType::kF32, 2, 150, 200, false, false, true);
  full.p.out_scale = MakePlane(DType::kF32, 2, 150, 200, false, false, false);
  full.p.amax = MakePlane(DType::kF32, 2, 150, 200, true, false, false);
  full.p.activation = Activation::kSilu;
  CheckCase(device, full);
  Case per_row = MakeCase("amax of rows", kE4, kE4, {1, 131, 77, 256}, rows, blocks, kBF);
  per_row.p.amax = MakePlane(DType::kF32, 1, 131, 77, true, true, false);
  per_row.p.activation = Activation::kRelu;
  CheckCase(device, per_row);
  Case large = MakeCase("many tiles", kE4, kE4, {1, 2500, 3336, 1024}, rows, blocks, kBF);
  CheckCase(device, large);
}

// int8 or uint8 with scales of rows or of the tensor, and zero points on neither, one or both
// sides.
Case MakeInt8Case(const char* name, DType lhs, DType rhs, const Shape& s, bool by_line,
                  bool lhs_zero, bool rhs_zero, DType out, bool lhs_mn = false,
                  bool rhs_mn = false) {
  TestSide l(lhs, s.batch, s.rows, s.depth, lhs_mn, true, lhs_zero, by_line ? 1 : s.rows, s.depth);
  TestSide r(rhs, s.batch, s.columns, s.depth, rhs_mn, true, rhs_zero, by_line ? 1 : s.columns,
             s.depth);
  Case c(name, s.batch, s.rows, s.columns, s.depth, std::move(l), std::move(r));
  c.p.out = MakePlane(out, s.batch, s.rows, s.columns, true, true, true);
  return c;
}

void CheckInt8(const Device& device) {
  constexpr DType kS8 = DType::kS8, kU8 = DType::kU8, kBF = DType::kBF16, kF = DType::kF32;
  const auto check = [&](Case c) { CheckCase(device, c); };
  check(MakeInt8Case("int8", kS8, kS8, {1, 256, 512, 512}, true, false, false, kBF));
  check(MakeInt8Case("int8 odd", kS8, kS8, {1, 67, 131, 401}, true, false, false, kF));
  check(MakeInt8Case("int8 one", kS8, kS8, {1, 1, 1, 1}, false, true, true, DType::kF16));
  check(MakeInt8Case("int8 lhs zeros", kS8, kS8, {1, 301, 260, 1040}, true, true, false, kF));
  check(MakeInt8Case("int8 rhs zeros", kS8, kS8, {1, 301, 260, 1040}, false, false, true, kF));
  check(MakeInt8Case("int8 zeros", kS8, kS8, {1, 301, 260, 1040}, true, true, true, kF));
  check(MakeInt8Case("uint8", kU8, kU8, {1, 130, 200, 272}, true, true, true, kF));
  check(MakeInt8Case("uint8 alone", kS8, kU8, {1, 130, 200, 272}, true, false, false, kF));
  check(MakeInt8Case("int8 batch", kS8, kU8, {3, 70, 100, 300}, true, true, true, kF));
  check(MakeInt8Case("int8 transposed", kS8, kS8, {2, 130, 144, 200}, true, true, true, kF, true,
                     true));
  Case bias = MakeInt8Case("int8 bias", kS8, kS8, {2, 150, 200, 256}, true, true, true, kBF);
  bias.p.bias = MakePlane(kF, 2, 150, 200, false, false, true);
  CheckCase(device, bias);
  Case full = MakeInt8Case("int8 epilogue", kS8, kS8, {2, 150, 200, 256}, true, true, true, kS8);
  full.p.residual = MakePlane(kBF, 2, 150, 200, true, true, true);
  full.p.bias = MakePlane(kF, 2, 150, 200, false, false, true);
  full.p.out_scale = MakePlane(kF, 2, 150, 200, false, false, false);
  full.p.amax = MakePlane(kF, 2, 150, 200, true, false, false);
  full.p.activation = Activation::kSilu;
  CheckCase(device, full);
  check(MakeInt8Case("int8 many tiles", kS8, kS8, {1, 2500, 3336, 1024}, true, true, true, kBF));
  // Every code at its limit: the largest sum that corrected values have.
  Case extreme = MakeInt8Case("int8 extremes", kS8, kS8, {1, 65, 40, 33025}, false, true, true, kF);
  for (TestSide* side : {&extreme.lhs, &extreme.rhs}) {
    std::fill(side->values.begin(), side->values.end(), 0x80);
    const int32_t zero = 127;
    std::memcpy(side->zero.data(), &zero, sizeof(zero));
    Must(cudaMemcpy(side->d_values->data, side->values.data(), side->values.size(),
                    cudaMemcpyHostToDevice));
    Must(cudaMemcpy(side->d_zero->data, side->zero.data(), side->zero.size(),
                    cudaMemcpyHostToDevice));
  }
  CheckCase(device, extreme);
}

// How weights are stored beside 16-bit values.
struct Stored {
  bool zeros = false, mn = false;
  Scales tiles = {0, 0};  // else of columns, or of the tensor
};

// 16-bit values times 8-bit weights with scales of columns or of the tensor.
Case MakeMixedCase(const char* name, DType wide, DType weight, const Shape& s, bool by_line,
                   DType out, const Stored& stored = {}) {
  const Scales tiles = stored.tiles.depth ? stored.tiles : Scales{by_line ? 1 : s.columns, s.depth};
  TestSide l(wide, s.batch, s.rows, s.depth, false, false, false, s.rows, s.depth);
  TestSide r(weight, s.batch, s.columns, s.depth, stored.mn, true, stored.zeros, tiles.lines,
             tiles.depth);
  Case c(name, s.batch, s.rows, s.columns, s.depth, std::move(l), std::move(r));
  c.p.out = MakePlane(out, s.batch, s.rows, s.columns, true, true, true);
  return c;
}

void CheckMixed(const Device& device, bool e4m3_only) {
  constexpr DType kE4 = DType::kE4M3, kE5 = DType::kE5M2, kS8 = DType::kS8;
  constexpr DType kBF = DType::kBF16, kH = DType::kF16, kF = DType::kF32;
  const auto check = [&](Case c) {
    if (e4m3_only && (c.p.rhs.dtype != kE4 || c.p.lhs.dtype != kBF)) return;
    CheckCase(device, c);
    CheckCase(device, c, false);
  };
  check(MakeMixedCase("mixed even", kBF, kE4, {1, 256, 384, 512}, true, kBF));
  check(MakeMixedCase("mixed odd", kBF, kE4, {1, 67, 131, 400}, true, kF));
  check(MakeMixedCase("mixed one", kBF, kE4, {1, 1, 1, 16}, false, kH));
  check(MakeMixedCase("mixed half", kH, kE4, {1, 301, 260, 1040}, true, kH));
  check(MakeMixedCase("mixed e5m2", kBF, kE5, {1, 301, 260, 1040}, true, kF));
  check(MakeMixedCase("mixed e5m2 half", kH, kE5, {1, 130, 200, 272}, true, kBF));
  check(MakeMixedCase("mixed int8", kBF, kS8, {1, 130, 200, 272}, true, kF));
  check(MakeMixedCase("mixed int8 half", kH, kS8, {1, 301, 260, 1040}, false, kF));
  check(MakeMixedCase("mixed batch", kBF, kE4, {3, 70, 100, 304}, true, kBF));
  Case full = MakeMixedCase("mixed epilogue", kBF, kE4, {2, 150, 200, 256}, true, kE4);
  full.p.residual = MakePlane(kBF, 2, 150, 200, true, true, true);
  full.p.bias = MakePlane(kF, 2, 150, 200, false, false, true);
  full.p.out_scale = MakePlane(kF, 2, 150, 200, false, false, false);
  full.p.amax = MakePlane(kF, 2, 150, 200, true, false, false);
  full.p.activation = Activation::kSilu;
  check(std::move(full));
  Case per_row = MakeMixedCase("mixed amax of rows", kBF, kE4, {1, 131, 77, 256}, true, kBF);
  per_row.p.amax = MakePlane(kF, 1, 131, 77, true, true, false);
  per_row.p.activation = Activation::kRelu;
  check(std::move(per_row));
  check(MakeMixedCase("mixed many tiles", kBF, kE4, {1, 2500, 3336, 1024}, true, kBF));
  check(MakeMixedCase("mixed deep", kBF, kE4, {1, 300, 3336, 4096}, true, kBF));
  check(MakeMixedCase("mixed deep and few", kBF, kE4, {2, 70, 300, 16400}, true, kF));
}

// Weights with zero points, in blocks and in [K, N].
void CheckStored(const Device& device) {
  constexpr DType kE4 = DType::kE4M3, kE5 = DType::kE5M2, kS8 = DType::kS8, kU8 = DType::kU8;
  constexpr DType kBF = DType::kBF16, kH = DType::kF16, kF = DType::kF32;
  const auto check = [&](Case c) {
    CheckCase(device, c);
    CheckCase(device, c, false);
  };
  constexpr Stored kZeros{true}, kTurned{false, true}, kBoth{true, true};
  check(MakeMixedCase("uint8", kBF, kU8, {1, 130, 200, 272}, true, kF));
  check(MakeMixedCase("uint8 half", kH, kU8, {1, 301, 260, 1040}, true, kBF, kZeros));
  check(MakeMixedCase("int8 zeros", kBF, kS8, {1, 301, 260, 1040}, true, kF, kZeros));
  check(MakeMixedCase("uint8 zeros", kBF, kU8, {3, 70, 100, 304}, true, kF, kZeros));
  Case far = MakeMixedCase("far zeros", kBF, kS8, {2, 131, 200, 272}, true, kF, kZeros);
  far.rhs.MakeZerosFar();
  check(std::move(far));
  check(MakeMixedCase("blocks", kBF, kE4, {1, 301, 260, 1040}, true, kF, {.tiles = {128, 128}}));
  check(MakeMixedCase("steps", kBF, kE4, {1, 67, 131, 400}, true, kBF, {.tiles = {1, 64}}));
  check(MakeMixedCase("groups", kBF, kS8, {2, 130, 200, 272}, true, kF, {true, false, {1, 128}}));
  check(
      MakeMixedCase("deep groups", kBF, kE5, {1, 300, 3336, 4096}, true, kBF, {.tiles = {1, 192}}));
  check(MakeMixedCase("half groups", kH, kU8, {1, 130, 200, 272}, true, kF, kBoth));
  Case far_groups =
      MakeMixedCase("far groups", kBF, kU8, {1, 70, 304, 1040}, true, kF, {true, true, {1, 64}});
  far_groups.rhs.MakeZerosFar();
  check(std::move(far_groups));
  check(MakeMixedCase("turned", kBF, kE4, {1, 256, 384, 512}, true, kBF, kTurned));
  check(MakeMixedCase("turned odd", kBF, kE5, {1, 67, 144, 408}, true, kF, kTurned));
  check(MakeMixedCase("turned half", kH, kE4, {2, 301, 272, 1040}, true, kH, kTurned));
  check(MakeMixedCase("turned zeros", kBF, kU8, {1, 130, 208, 272}, true, kF, kBoth));
  check(MakeMixedCase("turned many", kBF, kE4, {1, 2500, 3344, 1024}, true, kBF, kTurned));
  check(MakeMixedCase("turned groups", kBF, kS8, {3, 300, 336, 4096}, true, kBF,
                      {true, true, {1, 128}}));
  Case full = MakeMixedCase("turned epilogue", kBF, kE4, {2, 150, 208, 256}, true, kE4,
                            {false, true, {16, 64}});
  full.p.residual = MakePlane(kBF, 2, 150, 208, true, true, true);
  full.p.bias = MakePlane(kF, 2, 150, 208, false, false, true);
  full.p.out_scale = MakePlane(kF, 2, 150, 208, false, false, false);
  full.p.amax = MakePlane(kF, 2, 150, 208, true, false, false);
  full.p.activation = Activation::kSilu;
  check(std::move(full));
}

// NaN in a line of lhs must reach that row of the output, and no other.
void CheckNaN(const Device& device) {
  const int64_t m = 70, n = 40, k = 300;
  Case c =
      MakeCase("NaN", DType::kE4M3, DType::kE4M3, {1, m, n, k}, {1, 128}, {128, 128}, DType::kF32);
  c.lhs.values[5 * k + 299] = 0x7f;
  Must(cudaMemcpy(c.lhs.d_values->data, c.lhs.values.data(), c.lhs.values.size(),
                  cudaMemcpyHostToDevice));
  const Memory none(0), out(m * n * 4), workspace(1 << 20);
  Buffers b = c.Bind(none, none, none, out, none);
  b.workspace = workspace.data, b.workspace_bytes = workspace.bytes;
  std::string wrong;
  const auto plan = kSm90Gemm.plan(c.p, device, workspace.bytes, wrong);
  Must(wrong);
  Must(plan->Run(b, nullptr));
  const std::vector<uint8_t> bytes = out.Bytes();
  for (int64_t i = 0; i < m * n; ++i) {
    const bool nan = std::isnan(ValueOf(DType::kF32, bytes, i));
    Expect(nan == (i / n == 5), "NaN in row " + std::to_string(i / n));
  }
}

// ----------------------------------------------------------------------------------------- times

constexpr int kRepeats = 15;

// A product with operands in as many copies as exceed L2.
class Timed {
 public:
  //   type  e4m3 in blocks, or int8 with scales of rows and columns
  Timed(DType type, const Shape& s, const Device& device) : shape_(s), device_(device) {
    problem_.rows = s.rows, problem_.columns = s.columns, problem_.depth = s.depth;
    const int64_t steps = (s.depth + 127) / 128;
    problem_.lhs = {type, 0, s.depth, 1, true, false, DType::kF32, false, {1, 128, 0, steps, 1}};
    problem_.rhs = {type, 0, s.depth, 1, true, false, DType::kF32, false, {128, 128, 0, steps, 1}};
    if (type == DType::kS8) {
      problem_.lhs.tiles = problem_.rhs.tiles = {1, s.depth, 0, 1, 0};
    }
    if (type == DType::kBF16) {
      problem_.lhs = {type, 0, s.depth, 1};
      problem_.rhs = {DType::kE4M3,         0, s.depth, 1, true, false, DType::kF32, false,
                      {1, s.depth, 0, 1, 0}};
    }
    problem_.out = {DType::kBF16, 0, s.columns, 1};
    const int64_t bytes = (s.rows + s.columns) * s.depth;
    copies_ = static_cast<int>(std::min<int64_t>(20, 1 + (int64_t{200} << 20) / bytes));
    for (int i = 0; i < copies_; ++i) {
      lhs_.push_back(Random(type, s.rows * s.depth * SizeOf(type)));
      rhs_.push_back(Random(problem_.rhs.dtype, s.columns * s.depth));
      outs_.push_back(std::make_unique<Memory>(s.rows * s.columns * 2));
    }
    lhs_scale_ = std::make_unique<Memory>(RandomFloats(s.rows * steps, 0.5f, 2.0f));
    rhs_scale_ =
        std::make_unique<Memory>(RandomFloats(s.columns + s.columns / 128 * steps, 0.5f, 2.0f));
  }

  // Without a workspace blocks share no units.
  double Microseconds(const Configuration& c, size_t workspace) const {
    std::string wrong;
    const auto plan = sm90::PlanWith(c, problem_, device_, workspace, wrong);
    Must(wrong);
    cudaEvent_t start, stop;
    Must(cudaEventCreate(&start));
    Must(cudaEventCreate(&stop));
    const double work = 2e-6 * static_cast<double>(shape_.rows * shape_.columns) *
                        static_cast<double>(shape_.depth) / 1200;
    const int calls = std::clamp(static_cast<int>(2000 / (work + 10)), 2, 40);
    std::vector<float> times;
    int at = 0;
    for (int i = 0; i < kRepeats + 2; ++i) {
      Must(cudaEventRecord(start));
      for (int j = 0; j < calls; ++j, ++at) {
        Buffers b;
        b.lhs = lhs_[at % copies_]->data, b.rhs = rhs_[at % copies_]->data;
        b.lhs_scale = lhs_scale_->As<float>(), b.rhs_scale = rhs_scale_->As<float>();
        b.out = outs_[at % copies_]->data;
        b.workspace = workspace_.data, b.workspace_bytes = workspace;
        Must(plan->Run(b, nullptr));
      }
      Must(cudaEventRecord(stop));
      Must(cudaEventSynchronize(stop));
      float time;
      Must(cudaEventElapsedTime(&time, start, stop));
      if (i >= 2) times.push_back(time / static_cast<float>(calls));
    }
    std::sort(times.begin(), times.end());
    return 1e3 * times[times.size() / 2];
  }

  // What enqueuing takes on the host.
  double HostMicroseconds(const Configuration& c) const {
    std::string wrong;
    const auto plan = sm90::PlanWith(c, problem_, device_, 0, wrong);
    Buffers b;
    b.lhs = lhs_[0]->data, b.rhs = rhs_[0]->data;
    b.lhs_scale = lhs_scale_->As<float>(), b.rhs_scale = rhs_scale_->As<float>();
    b.out = outs_[0]->data;
    Must(cudaDeviceSynchronize());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) Must(plan->Run(b, nullptr));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    Must(cudaDeviceSynchronize());
    return took.count() / 100;
  }

  void Report(bool all) const {
    const Problem oriented = sm90::WithWeightsOnLeft(problem_);
    const Configuration chosen = sm90::Choose(oriented, device_.multiprocessors);
    struct Row {
      double us;
      Configuration c;
      bool shares;
    };
    std::vector<Row> rows;
    for (const Configuration& c : Configurations(problem_)) {
      const bool is_chosen = c.tile == chosen.tile && c.pair == chosen.pair;
      const double estimate = sm90::CyclesOf(oriented, c, device_.multiprocessors);
      const double best = sm90::CyclesOf(oriented, chosen, device_.multiprocessors);
      if (!is_chosen && (!all || estimate > 1.4 * best)) continue;
      rows.push_back({Microseconds(c, workspace_.bytes), c, true});
      if (sm90::IsMixed(problem_)) rows.push_back({Microseconds(c, 0), c, false});
    }
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.us < b.us; });
    const double products =
        static_cast<double>(shape_.rows * shape_.columns) * static_cast<double>(shape_.depth);
    const double bytes = static_cast<double>((shape_.rows + shape_.columns) * shape_.depth +
                                             2 * shape_.rows * shape_.columns);
    for (size_t i = 0; i < rows.size() && i < 4; ++i) {
      const auto& [us, c, shares] = rows[i];
      const bool is_chosen = c.tile == chosen.tile && c.pair == chosen.pair;
      std::printf("%s %5ld x %5ld x %5ld  %-12s%c%s %8.1f us %6.0f TFLOP/s %6.0f GB/s\n",
                  std::string(NameOf(problem_.lhs.dtype)).c_str(), shape_.rows, shape_.columns,
                  shape_.depth, NameOfConfiguration(c).c_str(), is_chosen ? '*' : ' ',
                  shares ? "" : " alone", us, 2e-6 * products / us, 1e-3 * bytes / us);
    }
    if (shape_.rows <= 128) {
      std::printf("%60s %.1f us on the host\n", "", HostMicroseconds(chosen));
    }
  }

 private:
  static std::unique_ptr<Memory> Random(DType type, int64_t bytes) {
    const int64_t some = std::min<int64_t>(bytes, 1 << 22);
    static const std::vector<uint8_t> floats = Normal(DType::kE4M3, 100, 1 << 22);
    static const std::vector<uint8_t> integers = Normal(DType::kS8, 23, 1 << 22);
    static const std::vector<uint8_t> wide = Normal(DType::kBF16, 1, 1 << 22);
    const std::vector<uint8_t>& random = type == DType::kS8     ? integers
                                         : type == DType::kBF16 ? wide
                                                                : floats;
    auto memory = std::make_unique<Memory>(bytes);
    for (int64_t at = 0; at < bytes; at += some) {
      Must(cudaMemcpy(memory->As<char>() + at, random.data(), std::min(some, bytes - at),
                      cudaMemcpyHostToDevice));
    }
    return memory;
  }
  // Normal values, as quantised data are: the power that a product draws depends on its data.
  static std::vector<uint8_t> Normal(DType type, float deviation, int64_t count) {
    std::vector<uint8_t> bytes(count);
    count /= SizeOf(type);
    std::normal_distribution<float> normal(0.0f, deviation);
    for (int64_t i = 0; i < count; ++i) SetValue(type, bytes, i, normal(rng));
    return bytes;
  }

  Shape shape_;
  Device device_;
  Problem problem_;
  int copies_ = 1;
  Memory workspace_{size_t{32} << 20};
  std::vector<std::unique_ptr<Memory>> lhs_, rhs_, outs_;
  std::unique_ptr<Memory> lhs_scale_, rhs_scale_;
};

constexpr Shape kTimed[] = {{1, 4096, 7168, 16384}, {1, 4096, 4096, 7168}, {1, 4096, 24576, 1536},
                            {1, 4096, 7168, 2048},  {1, 4096, 2112, 7168}, {1, 4096, 32768, 512},
                            {1, 64, 7168, 16384},   {1, 64, 4096, 7168},   {1, 512, 4096, 7168},
                            {1, 128, 7168, 2048}};
constexpr Shape kTimedInt8[] = {{1, 4096, 8192, 8192}, {1, 4096, 4096, 4096}, {1, 8192, 8192, 8192},
                                {1, 1024, 8192, 8192}, {1, 2048, 5120, 5120}, {1, 256, 8192, 8192},
                                {1, 64, 8192, 8192},   {1, 16, 4096, 14336}};

constexpr Shape kTimedMixed[] = {
    {1, 128, 28672, 8192},  {1, 256, 28672, 8192},  {1, 512, 28672, 8192}, {1, 1024, 28672, 8192},
    {1, 4096, 28672, 8192}, {1, 128, 14336, 4096},  {1, 256, 14336, 4096}, {1, 512, 14336, 4096},
    {1, 1024, 14336, 4096}, {1, 4096, 14336, 4096}, {1, 4096, 4096, 4096}, {1, 128, 4096, 4096},
    {1, 256, 4096, 4096},   {1, 512, 4096, 4096},   {1, 1024, 4096, 4096}, {1, 128, 4096, 14336},
    {1, 512, 4096, 14336},  {1, 96, 14336, 4096},   {1, 192, 14336, 4096}, {1, 2048, 5120, 5120}};

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (count == 5) {
    const auto size = [&](int i) { return int64_t{std::atoi(arguments[i])}; };
    const std::string name = arguments[1];
    const DType type = name == "int8" ? DType::kS8 : name == "mixed" ? DType::kBF16 : DType::kE4M3;
    Timed(type, {1, size(2), size(3), size(4)}, ThisDevice()).Report(false);
    return 0;
  }
  const std::string only = count > 1 ? arguments[1] : "";
  const Device device = ThisDevice();
  if (only == "mixed") {
    const std::string what = count > 2 ? arguments[2] : "";
    CheckMixed(device, what != "all");
    CheckStored(device);
    std::printf("checks: %d, failures: %d\n", checks, failures);
    for (const Shape& shape : kTimedMixed) Timed(DType::kBF16, shape, device).Report(true);
    return failures ? 1 : 0;
  }
  if (only == "" || only == "check") {
    CheckValues(device);
    CheckInt8(device);
    CheckMixed(device, false);
    CheckStored(device);
    CheckNaN(device);
    std::printf("checks: %d, failures: %d\n", checks, failures);
  }
  if (only != "check") {
    for (const Shape& shape : kTimedInt8) Timed(DType::kS8, shape, device).Report(only == "all");
    for (const Shape& shape : kTimed) Timed(DType::kE4M3, shape, device).Report(only == "all");
  }
  return failures ? 1 : 0;
}
