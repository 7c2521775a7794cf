// Checks groups of rows, and of the contracted axis, in `sm90_gemm` on this machine's Hopper GPU
// against float64, then times them.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -I ffi \
//     -o sm90_gemm_groups_bench ffi/bench/sm90_gemm_groups_bench.cu \
//     ffi/cuda/kernels/sm90_gemm/*.{cu,cc} ffi/cuda/kernels/{epilogue/epilogue,pack/pack}.cu \
//     ffi/cuda/{problem,error}.cc
//   ./sm90_gemm_groups_bench [check|time|all]     all: times of other tile shapes too

#include <memory>
#include <numeric>

#include "bench/product_case.h"
#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"

namespace {

using sm90::Configuration;
using sm90::Pair;
using sm90::TileShape;
using Sizes = std::vector<int32_t>;

std::string NameOf(const Configuration& c) {
  const char* pair = c.pair == Pair::kNone ? "-" : c.pair == Pair::kSharesLhs ? "lhs" : "rhs";
  return std::to_string(c.tile.rows) + "x" + std::to_string(c.tile.columns) + " " + pair;
}

std::vector<uint8_t> BytesOf(const Sizes& sizes) {
  std::vector<uint8_t> bytes(4 * sizes.size());
  std::memcpy(bytes.data(), sizes.data(), bytes.size());
  return bytes;
}

// ---------------------------------------------------------------------------------------- checks

// What the tensor cores cut off of the terms of an instruction, and of a sum that they keep from
// one to the next; relative to the sum of magnitudes.
constexpr double kLost = 0x1p-10, kFastLost = 0x1p-8;

struct Tile {
  int64_t free, depth;
};

bool IsContracted(Grouping grouping) { return grouping == Grouping::kContracted; }

// A product of groups, with operands on host and device.
struct GroupsCase {
  std::string name;
  Problem p;
  Sizes sizes;
  TestSide lhs, rhs;
  int64_t every = 1;  // one column of so many is compared

  GroupsCase(const char* name, Grouping grouping, DType lhs_type, DType rhs_type, Sizes given,
             int64_t rows, int64_t columns, int64_t depth, Tile lhs_tile, Tile rhs_tile, DType out,
             bool rhs_mn = false)
      : name(name),
        sizes(std::move(given)),
        lhs(lhs_type, 1, rows, depth, false, true, false, lhs_tile.free, lhs_tile.depth),
        rhs(rhs_type, IsContracted(grouping) ? 1 : static_cast<int64_t>(sizes.size()), columns,
            depth, rhs_mn, true, false, rhs_tile.free, rhs_tile.depth) {
    p.grouping = grouping;
    p.batch = static_cast<int64_t>(sizes.size());
    p.rows = rows, p.columns = columns, p.depth = depth;
    p.lhs = lhs.side, p.rhs = rhs.side;
    p.lhs.batch = p.lhs.tiles.batch_stride = 0;
    if (IsContracted(grouping)) p.rhs.batch = p.rhs.tiles.batch_stride = 0;
    p.out = {out, IsContracted(grouping) ? rows * columns : 0, columns, 1};
    const int64_t products = OutRows() * columns * depth;
    if (products > 1e7) every = products / 1e7;
  }

  // The rows of the output: of all batch indices.
  int64_t OutRows() const { return p.rows * (IsContracted(p.grouping) ? p.batch : 1); }

  // The group of each row, or of each value of the contracted axis; or -1.
  std::vector<int32_t> Groups() const {
    const int64_t lines = IsContracted(p.grouping) ? p.depth : p.rows;
    std::vector<int32_t> groups(lines, -1);
    const bool masked = p.grouping == Grouping::kMasked;
    int64_t line = 0;
    for (int32_t group = 0; group < p.batch; ++group) {
      if (masked) line = group * (p.rows / p.batch);
      const int64_t end = masked ? line + p.rows / p.batch : lines;
      for (int32_t i = 0; i < sizes[group] && line < end; ++i) groups[line++] = group;
    }
    return groups;
  }

  // The sum of an output, and of magnitudes.
  std::pair<double, double> SumOf(const std::vector<int32_t>& groups, int64_t out_row,
                                  int64_t column) const {
    const bool contracted = IsContracted(p.grouping);
    const int64_t row = out_row % p.rows, batch = contracted ? 0 : groups[row];
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; batch >= 0 && k < p.depth; ++k) {
      if (contracted && groups[k] != out_row / p.rows) continue;
      const double term = lhs.At(0, row, k) * rhs.At(batch, column, k);
      sum += term, magnitude += std::fabs(term);
    }
    return {sum, magnitude};
  }

  void Compare(const std::vector<uint8_t>& out, const std::string& label) const {
    const std::vector<int32_t> groups = Groups();
    const double lost = !IsFloat8(p.lhs.dtype) ? 0 : sm90::SumsFirst(p) ? kFastLost : kLost;
    int64_t wrong = 0, all = 0;
    std::string example;
    for (int64_t row = 0; row < OutRows(); ++row) {
      for (int64_t column = row % every; column < p.columns; column += every, ++all) {
        const auto [sum, magnitude] = SumOf(groups, row, column);
        const double roundings = static_cast<double>(p.depth) + 8;
        const double slack = 1.2 * (roundings * 0x1p-24 + lost) * magnitude + 4e-6 * std::fabs(sum);
        const double low = Case::Coded(p.out.dtype, sum - slack);
        const double high = Case::Coded(p.out.dtype, sum + slack);
        const double got = ValueOf(p.out.dtype, out, row * p.columns + column);
        if ((got >= low && got <= high) || wrong++ > 0) continue;
        example = ", such as " + std::to_string(got) + " at " + std::to_string(row) + "," +
                  std::to_string(column) + ", not in [" + std::to_string(low) + ", " +
                  std::to_string(high) + "]";
      }
    }
    Expect(wrong == 0,
           label + ": " + std::to_string(wrong) + " of " + std::to_string(all) + example);
  }

  // With every tile shape, twice.
  void Check(const Device& device) const {
    Must(sm90::WhyNot(p, device));
    const Memory d_sizes(BytesOf(sizes)), workspace(size_t{64} << 20);
    for (const TileShape tile : sm90::TileShapesOf(p)) {
      for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
        const std::string label = name + " " + NameOf({tile, pair});
        std::string wrong;
        const auto plan = sm90::PlanWith({tile, pair}, p, device, workspace.bytes, wrong);
        Must(wrong);
        std::vector<uint8_t> first;
        for (int i = 0; i < 2; ++i) {
          const Memory out(OutRows() * p.columns * SizeOf(p.out.dtype));
          Buffers b;
          b.lhs = lhs.d_values->data, b.rhs = rhs.d_values->data;
          b.lhs_scale = lhs.d_scale->As<float>(), b.rhs_scale = rhs.d_scale->As<float>();
          b.group_sizes = d_sizes.As<int32_t>();
          b.out = out.data, b.workspace = workspace.data, b.workspace_bytes = workspace.bytes;
          Must(plan->Run(b, nullptr));
          const std::vector<uint8_t> bytes = out.Bytes();
          if (i == 0) Compare(bytes, label);
          if (i == 0) first = bytes;
          Expect(bytes == first, label + ": the bits differ from run to run");
        }
      }
    }
  }
};

void Check(const Device& device) {
  constexpr Grouping kC = Grouping::kContiguous, kM = Grouping::kMasked;
  constexpr Grouping kK = Grouping::kContracted;
  constexpr DType kE4 = DType::kE4M3, kE5 = DType::kE5M2, kS8 = DType::kS8, kU8 = DType::kU8;
  constexpr DType kBF = DType::kBF16, kH = DType::kF16, kF = DType::kF32;
  constexpr Tile kRow{1, 128}, kBlock{128, 128};
  const Tile line{1, 1 << 20}, tensor{1 << 20, 1 << 20};
  const Sizes uneven{3, 0, 129, 65, 0, 1, 300}, many = [] {
    Sizes sizes(200);
    for (int i = 0; i < 200; ++i) sizes[i] = i * 37 % 23;
    return sizes;
  }();
  const auto check = [&](const GroupsCase& c) { c.Check(device); };
  check({"blocks", kC, kE4, kE4, uneven, 500, 260, 400, kRow, kBlock, kBF});
  check({"full", kC, kE4, kE4, {256, 128, 116}, 500, 256, 512, kRow, kBlock, kH});
  check({"lines", kC, kE4, kE5, uneven, 498, 131, 401, line, line, kF});
  check({"tensor", kC, kE5, kE4, {0, 0, 0, 7}, 40, 33, 17, tensor, tensor, kF});
  check({"no rows in groups", kC, kE4, kE4, {0, 0}, 70, 40, 128, kRow, kBlock, kBF});
  check({"too many rows",
         kC,
         kE4,
         kE4,
         {-3, 60, 2147483647, 2147483647},
         100,
         72,
         256,
         kRow,
         kBlock,
         kBF});
  check({"one group", kC, kE4, kE4, {90}, 100, 72, 256, kRow, kBlock, kF});
  check({"many groups", kC, kE4, kE4, many, 2300, 136, 144, kRow, kRow, kF});
  check({"transposed rhs", kC, kE4, kE4, uneven, 510, 144, 200, kRow, kBlock, kF, true});
  check({"int8", kC, kS8, kS8, uneven, 511, 260, 400, line, line, kF});
  check({"int8 tensor", kC, kS8, kU8, {5, 0, 70}, 75, 32, 33, tensor, line, kBF});
  check({"masked", kM, kE4, kE4, {3, 0, 200, 150, 65}, 1000, 260, 400, kRow, kBlock, kBF});
  check({"masked lines", kM, kE4, kE4, {-1, 17, 70, 64}, 268, 131, 401, line, line, kF});
  check({"masked int8", kM, kS8, kS8, {128, 1, 0}, 384, 96, 256, line, line, kH});
  check({"of K", kK, kE4, kE4, {3, 0, 129, 65, 0, 1, 200}, 260, 131, 416, kRow, kRow, kF});
  check({"of K, aligned", kK, kE4, kE4, {128, 256, 128}, 256, 256, 512, kRow, kBlock, kBF});
  check({"of K, tensor", kK, kE4, kE5, {130, 7, 300}, 300, 200, 512, tensor, tensor, kF});
  check({"of K, lines", kK, kE5, kE5, {130, 7, 300}, 300, 200, 512, line, line, kF});
  check({"of K, too many", kK, kE4, kE4, {-3, 60, 2147483647, 5}, 70, 72, 320, kRow, kRow, kH});
  check({"of K, none", kK, kE4, kE4, {0, 0}, 70, 40, 128, kRow, kRow, kBF});
  check({"of K, many", kK, kE4, kE4, many, 140, 70, 2304, kRow, kRow, kBF});
  check({"of K, int8", kK, kS8, kS8, {70, 1, 130, 200}, 130, 260, 416, line, line, kF});
  check({"of K, large", kK, kE4, kE4, {2500, 0, 1337, 1000}, 520, 600, 5008, kRow, kRow, kBF});
  check({"large", kC, kE4, kE4, {2500, 0, 1337, 1000}, 5000, 520, 1024, kRow, kBlock, kBF});
  std::printf("checks: %d, failures: %d\n", checks, failures);
}

// ----------------------------------------------------------------------------------------- times

constexpr int kRepeats = 15;

// How scales of e4m3 lie: one for each tensor, in blocks of weights, or for 128 of each line.
enum class Scales { kTensor, kBlocks, kSteps };

//   grouping  kNone: a batch of products that have equal parts of `depth`, beside groups of it
struct Timing {
  const char* name;
  Grouping grouping;
  Sizes sizes;
  int64_t rows, columns, depth;
  Scales scales = Scales::kBlocks;
};

// A side of `groups` matrices, or of one.
//   depth  of a line in memory
Side SideOf(int64_t lines, int64_t depth, int64_t groups, Scales scales, int64_t tile_lines) {
  const int64_t steps = (depth + 127) / 128, tiles = (lines + tile_lines - 1) / tile_lines;
  Side side;
  side.dtype = DType::kE4M3, side.scale = true;
  side.batch = groups > 1 ? lines * depth : 0, side.free = depth, side.depth = 1;
  side.tiles = {tile_lines, 128, groups > 1 ? tiles * steps : 0, steps, 1};
  if (scales == Scales::kTensor) side.tiles = {lines, depth, 0, 0, 0};
  return side;
}

Problem ProblemOf(const Timing& t) {
  const auto groups = static_cast<int64_t>(t.sizes.size());
  const bool rows = t.grouping == Grouping::kContiguous || t.grouping == Grouping::kMasked;
  Problem p;
  p.grouping = t.grouping;
  p.batch = groups, p.rows = t.rows, p.columns = t.columns, p.depth = t.depth;
  p.lhs = SideOf(t.rows, t.depth, 1, t.scales, 1);
  p.rhs = SideOf(t.columns, t.depth, rows ? groups : 1, t.scales,
                 t.scales == Scales::kBlocks ? 128 : 1);
  p.out = {DType::kBF16, rows ? 0 : t.rows * t.columns, t.columns, 1};
  if (t.grouping != Grouping::kNone) return p;
  p.depth /= groups;
  for (Side* side : {&p.lhs, &p.rhs}) {
    side->batch = p.depth;
    if (t.scales != Scales::kTensor) side->tiles.batch_stride = p.depth / 128;
  }
  return p;
}

// e4m3, with operands in as many copies as exceed L2.
class Timed {
 public:
  Timed(const Timing& t, const Device& device) : t_(t), device_(device), problem_(ProblemOf(t)) {
    const auto groups = static_cast<int64_t>(t.sizes.size());
    const bool rows = problem_.out.batch == 0;
    const int64_t steps = (t.depth + 127) / 128;
    for (int i = 0; i < kCopies; ++i) {
      lhs_.push_back(Normal(t.rows * t.depth));
      rhs_.push_back(Normal((rows ? groups : 1) * t.columns * t.depth));
      outs_.push_back(std::make_unique<Memory>(2 * t.rows * t.columns * (rows ? 1 : groups)));
    }
    lhs_scale_ = std::make_unique<Memory>(RandomFloats(t.rows * steps, 0.5f, 2.0f));
    rhs_scale_ = std::make_unique<Memory>(RandomFloats(groups * t.columns * steps, 0.5f, 2.0f));
    sizes_ = std::make_unique<Memory>(BytesOf(t.sizes));
  }

  void Report(bool all) const {
    const Configuration chosen = sm90::Choose(problem_, device_.multiprocessors);
    const double grouped = std::accumulate(t_.sizes.begin(), t_.sizes.end(), 0.0);
    const int64_t others_of = problem_.out.batch == 0 ? t_.depth : t_.rows;
    const double products = grouped * static_cast<double>(t_.columns * others_of);
    std::vector<Configuration> others = {chosen};
    for (const TileShape tile : sm90::TileShapesOf(problem_)) {
      if (tile.rows < 128) continue;
      for (const Pair pair : {Pair::kNone, Pair::kSharesLhs, Pair::kSharesRhs}) {
        if (all) others.push_back({tile, pair});
      }
    }
    for (size_t i = 0; i < others.size(); ++i) {
      const double us = Microseconds(others[i]);
      std::printf("%-22s %2zu of %5ld x %5ld x %5ld  %-12s%c %8.1f us %6.0f TFLOP/s\n", t_.name,
                  t_.sizes.size(), t_.rows, t_.columns, t_.depth, NameOf(others[i]).c_str(),
                  i == 0 ? '*' : ' ', us, 2e-6 * products / us);
    }
  }

 private:
  static constexpr int kCopies = 2;

  double Microseconds(const Configuration& c) const {
    std::string wrong;
    const auto plan = sm90::PlanWith(c, problem_, device_, 0, wrong);
    Must(wrong);
    cudaEvent_t start, stop;
    Must(cudaEventCreate(&start));
    Must(cudaEventCreate(&stop));
    constexpr int kCalls = 6;
    std::vector<float> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      Must(cudaEventRecord(start));
      for (int j = 0; j < kCalls; ++j) {
        Buffers b;
        b.lhs = lhs_[j % kCopies]->data, b.rhs = rhs_[j % kCopies]->data;
        b.lhs_scale = lhs_scale_->As<float>(), b.rhs_scale = rhs_scale_->As<float>();
        b.group_sizes = sizes_->As<int32_t>();
        b.out = outs_[j % kCopies]->data;
        Must(plan->Run(b, nullptr));
      }
      Must(cudaEventRecord(stop));
      Must(cudaEventSynchronize(stop));
      float time;
      Must(cudaEventElapsedTime(&time, start, stop));
      if (i >= 2) times.push_back(time / kCalls);
    }
    std::sort(times.begin(), times.end());
    return 1e3 * times[times.size() / 2];
  }

  // Normal values, as quantised data are: the power that a product draws depends on its data.
  static std::unique_ptr<Memory> Normal(int64_t bytes) {
    static const std::vector<uint8_t> some = [] {
      std::vector<uint8_t> values(1 << 22);
      std::normal_distribution<float> normal(0.0f, 100.0f);
      for (size_t i = 0; i < values.size(); ++i) SetValue(DType::kE4M3, values, i, normal(rng));
      return values;
    }();
    auto memory = std::make_unique<Memory>(bytes);
    const auto part = static_cast<int64_t>(some.size());
    for (int64_t at = 0; at < bytes; at += part) {
      Must(cudaMemcpy(memory->As<char>() + at, some.data(), std::min(part, bytes - at),
                      cudaMemcpyHostToDevice));
    }
    return memory;
  }

  Timing t_;
  Device device_;
  Problem problem_;
  std::vector<std::unique_ptr<Memory>> lhs_, rhs_, outs_;
  std::unique_ptr<Memory> lhs_scale_, rhs_scale_, sizes_;
};

void Time(const Device& device, bool all) {
  constexpr Grouping kC = Grouping::kContiguous, kM = Grouping::kMasked;
  constexpr Grouping kK = Grouping::kContracted;
  const Sizes even(8, 1024), half(8, 512), few(8, 128);
  const Sizes uneven{1900, 17, 640, 1203, 0, 2221, 811, 1400}, experts = [] {
    Sizes sizes(64);
    for (int i = 0; i < 64; ++i) sizes[i] = 64 + i * 37 % 128;
    return sizes;
  }();
  const int64_t of_experts = std::accumulate(experts.begin(), experts.end(), int64_t{0});
  for (const auto& [columns, depth] : {std::pair<int64_t, int64_t>{4096, 7168}, {7168, 2048}}) {
    for (const Timing& t : {Timing{"even", kC, even, 8192, columns, depth},
                            {"uneven", kC, uneven, 8192, columns, depth},
                            {"half of the rows", kC, half, 8192, columns, depth},
                            {"masked, 128 of 1024", kM, few, 8192, columns, depth},
                            {"64 experts", kC, experts, of_experts, columns, depth}}) {
      Timed(t, device).Report(all);
    }
  }
  const Sizes odd{1901, 17, 640, 1203, 0, 2220, 811, 1400};
  constexpr Scales kT = Scales::kTensor, kS = Scales::kSteps;
  for (const Timing& t : {Timing{"even, tensor", kC, even, 8192, 4096, 7168, kT},
                          {"uneven, tensor", kC, uneven, 8192, 4096, 7168, kT},
                          {"batch beside K", Grouping::kNone, even, 4096, 7168, 8192, kS},
                          {"of K, even", kK, even, 4096, 7168, 8192, kS},
                          {"of K, odd", kK, odd, 4096, 7168, 8192, kS},
                          {"batch beside K, tensor", Grouping::kNone, even, 4096, 7168, 8192, kT},
                          {"of K, even, tensor", kK, even, 4096, 7168, 8192, kT},
                          {"of K, odd, tensor", kK, odd, 4096, 7168, 8192, kT}}) {
    Timed(t, device).Report(all);
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string only = count > 1 ? arguments[1] : "";
  const Device device = NamedDevice();
  if (only == "" || only == "check") Check(device);
  if (only != "check") Time(device, only == "all");
  return failures ? 1 : 0;
}
