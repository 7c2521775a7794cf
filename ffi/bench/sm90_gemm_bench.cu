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

#include "bench/sm90_gemm_checks.inc"

// ----------------------------------------------------------------------------------------- times

constexpr int kRepeats = 15;

// A product with operands in as many copies as exceed L2.
class Timed {
 public:
  //   type  e4m3 in blocks, or int8 with scales of rows and columns
  //   blocks  scales of 128 x 128 weights beside 16-bit values, not of their columns
  Timed(DType type, const Shape& s, const Device& device, bool blocks = false)
      : shape_(s), device_(device) {
    problem_.rows = s.rows, problem_.columns = s.columns, problem_.depth = s.depth;
    const int64_t steps = (s.depth + 127) / 128;
    const Tiles of_lines = {1, s.depth, 0, 1, 0}, of_blocks = {128, 128, 0, steps, 1};
    problem_.lhs = problem_.rhs = LinesOf(type, s.depth);
    problem_.lhs.scale = type != DType::kBF16, problem_.rhs.scale = true;
    if (type == DType::kE4M3) {
      problem_.lhs.tiles = {1, 128, 0, steps, 1}, problem_.rhs.tiles = of_blocks;
    } else {
      problem_.lhs.tiles = problem_.rhs.tiles = of_lines;
    }
    if (type == DType::kBF16) {
      problem_.rhs.dtype = DType::kE4M3;
      if (blocks) problem_.rhs.tiles = of_blocks;
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
  static Side LinesOf(DType type, int64_t depth) {
    Side side;
    side.dtype = type, side.free = depth, side.depth = 1;
    return side;
  }
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
    Timed(type, {1, size(2), size(3), size(4)}, NamedDevice()).Report(false);
    return 0;
  }
  const std::string only = count > 1 ? arguments[1] : "";
  const Device device = NamedDevice();
  if (only == "mixed") {
    const std::string what = count > 2 ? arguments[2] : "";
    CheckMixed(device, what != "all");
    CheckStored(device);
    std::printf("checks: %d, failures: %d\n", checks, failures);
    for (const Shape& shape : kTimedMixed) Timed(DType::kBF16, shape, device).Report(true);
    std::printf("the same with scales of blocks of weights\n");
    for (const Shape& shape : kTimedMixed) Timed(DType::kBF16, shape, device, true).Report(false);
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
