// Checks `sm80_w8a16` on this machine's GPU against float64, then times it.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -arch=native -I ffi -o w8a16_bench \
//     ffi/bench/w8a16_bench.cu ffi/cuda/kernels/sm80_w8a16/*.{cu,cc} \
//     ffi/cuda/kernels/epilogue/epilogue.cu ffi/cuda/{problem,error}.cc
//   ./w8a16_bench [check|small|joint|time]     small: few problems, for compute-sanitizer

#include <algorithm>
#include <cstring>

#include "bench/w8a16_check.h"
#include "cuda/kernels/sm80_w8a16/path.h"
#include "cuda/kernels/sm80_w8a16/plan.h"

namespace jaxfp8::cuda::bench {
namespace {

Device ThisDevice() {
  cudaDeviceProp properties;
  Require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Device device;
  device.compute_capability = 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  device.shared_bytes = properties.sharedMemPerBlockOptin;
  std::printf("%s, compute capability %d, %d multiprocessors, L2 %zu MiB\n", properties.name,
              device.compute_capability, device.multiprocessors, device.l2_bytes >> 20);
  return device;
}

int failures = 0, checks = 0;

void Fail(const std::string& name, const std::string& what) {
  if (++failures <= 40) std::printf("FAILED %s: %s\n", name.c_str(), what.c_str());
}

template <typename T>
const T* Upload(DeviceBytes& to, const std::vector<T>& from, size_t shift = 0) {
  if (!from.empty()) {
    Require(cudaMemcpy(to.at + shift, from.data(), from.size() * sizeof(T), cudaMemcpyDefault),
            "cudaMemcpy");
  }
  return from.empty() ? nullptr : reinterpret_cast<const T*>(to.at + shift);
}

// A case on the device, with outputs and a workspace filled with a pattern.
class Loaded {
 public:
  Loaded(const Case& c, const Data& data)
      : name_(c.Name()),
        out_bytes_(static_cast<size_t>(c.batch * c.rows * c.columns) * SizeOf(c.out)),
        amax_count_(static_cast<size_t>(data.AmaxCount())),
        weights_(Bytes(data.weights) + 64),
        activations_(Bytes(data.activations) + 64),
        scales_(Bytes(data.scales)),
        rows_(Bytes(data.row_scales)),
        zeros_(Bytes(data.zeros)),
        bias_(Bytes(data.bias)),
        residual_(Bytes(data.residual)),
        out_scales_(Bytes(data.out_scales)),
        result_(out_bytes_),
        largest_(4 * amax_count_),
        workspace_(c.workspace) {
    buffers.rhs = Upload(weights_, data.weights, c.shift);
    buffers.lhs = Upload(activations_, data.activations, 2 * c.shift);
    buffers.rhs_scale = Upload(scales_, data.scales);
    buffers.lhs_scale = Upload(rows_, data.row_scales);
    buffers.rhs_zero_point = Upload(zeros_, data.zeros);
    buffers.bias = Upload(bias_, data.bias);
    buffers.residual = Upload(residual_, data.residual);
    buffers.out_scale = Upload(out_scales_, data.out_scales);
    buffers.out = result_.at;
    buffers.amax = reinterpret_cast<float*>(largest_.at);
    buffers.workspace = workspace_.at;
    buffers.workspace_bytes = c.workspace;
    Require(cudaMemset(result_.at, 0xa5, out_bytes_ + 16), "cudaMemset");
    Require(cudaMemset(largest_.at, 0xa5, 4 * amax_count_), "cudaMemset");
    Require(cudaMemset(workspace_.at, 0xff, c.workspace), "cudaMemset");
  }

  // The outputs; whether nothing was written past their end.
  bool Fetch(std::vector<uint8_t>& out, std::vector<float>& amax) const {
    out.resize(out_bytes_ + 16), amax.resize(amax_count_);
    Require(cudaMemcpy(out.data(), result_.at, out.size(), cudaMemcpyDefault), "cudaMemcpy");
    Require(cudaMemcpy(amax.data(), largest_.at, 4 * amax_count_, cudaMemcpyDefault), "cudaMemcpy");
    const bool kept = std::all_of(out.end() - 16, out.end(), [](uint8_t b) { return b == 0xa5; });
    out.resize(out_bytes_);
    if (!kept) Fail(name_, "wrote past the end");
    return kept;
  }

  Buffers buffers;

 private:
  template <typename T>
  static size_t Bytes(const std::vector<T>& values) {
    return values.size() * sizeof(T);
  }

  std::string name_;
  size_t out_bytes_, amax_count_;
  DeviceBytes weights_, activations_, scales_, rows_, zeros_, bias_, residual_, out_scales_;
  DeviceBytes result_, largest_, workspace_;
};

// Runs a case and gets `out` and `amax`.
bool RunOnce(const Device& device, const Case& c, const Data& data, std::vector<uint8_t>& out,
             std::vector<float>& amax) {
  const Loaded loaded(c, data);
  const Problem problem = c.swapped ? Swapped(data.problem) : data.problem;
  const Buffers buffers = c.swapped ? Swapped(loaded.buffers) : loaded.buffers;
  std::string wrong = kSm80W8A16.why_not(problem, device);
  std::unique_ptr<Plan> plan;
  if (wrong.empty()) plan = kSm80W8A16.plan(problem, device, c.workspace, wrong);
  if (wrong.empty()) wrong = plan->Run(buffers, nullptr);
  if (!wrong.empty()) return Fail(c.Name(), wrong), false;
  Require(cudaDeviceSynchronize(), c.Name().c_str());
  return loaded.Fetch(out, amax);
}

void CheckValue(const Case& c, int64_t r, int64_t column, double got, double want, double error) {
  const Rounding rounding = RoundingOf(c.out);
  const double low = c.out == DType::kU8 ? 0.0 : c.out == DType::kS8 ? -128.0 : -rounding.most;
  const double clipped = std::min(std::max(want, low), rounding.most);
  const double bound = error + std::fabs(clipped) * rounding.share * 1.01 + rounding.least * 1.01;
  if (std::fabs(got - clipped) <= bound) return;
  if (std::isinf(got) && got * want > 0 && std::fabs(want) + error >= rounding.overflow) return;
  char text[160];
  std::snprintf(text, sizeof text, "at (%lld, %lld): got %.9g, want %.9g +- %.3g",
                static_cast<long long>(r), static_cast<long long>(column), got, clipped, bound);
  Fail(c.Name(), text);
}

// Compares outputs with float64.
void CheckOutputs(const Case& c, const Data& data, const std::vector<uint8_t>& out,
                  const std::vector<float>& amax) {
  std::vector<double> largest(amax.size(), 0.0), slack(amax.size(), 0.0);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t column = 0; column < c.columns; ++column) {
        const Data::Answer answer = data.At(b, r, column);
        const double scale =
            c.out_scale ? data.out_scales[data.problem.out_scale.At(b, r, column)] : 1.0;
        const double got = Value(c.out, out.data(), data.problem.out.At(b, r, column));
        CheckValue(c, r, column, got, answer.y / scale, answer.error / scale);
        const size_t at = data.problem.amax.row ? static_cast<size_t>(r) : 0;
        largest[at] = std::max(largest[at], std::fabs(answer.y));
        slack[at] = std::max(slack[at], answer.error);
      }
    }
  }
  for (size_t i = 0; c.amax && i < amax.size(); ++i) {
    if (!(std::fabs(amax[i] - largest[i]) <= slack[i])) Fail(c.Name(), "amax is wrong");
  }
}

void Check(const Device& device, const Case& c) {
  ++checks;
  const Data data(c);
  std::vector<uint8_t> out, again;
  std::vector<float> amax, amax_again;
  if (!RunOnce(device, c, data, out, amax) || !RunOnce(device, c, data, again, amax_again)) return;
  if (out != again) Fail(c.Name(), "a second run gave other bits");
  CheckOutputs(c, data, out, amax);
}

// A column for each code, with no other code in it: the output is the decoded code, bit for bit.
void CheckCodes(const Device& device, Case c, int zero, int place) {
  ++checks;
  c.columns = 256, c.depth = 128;
  if (zero != 0) c.tile_free = 256, c.tile_depth = 128, c.zero_points = 1;
  Data data(c);
  for (float& scale : data.scales) scale = 1.0f;
  for (int32_t& z : data.zeros) z = zero;
  auto* halves = reinterpret_cast<uint16_t*>(data.activations.data());
  const uint16_t one = c.wide == DType::kBF16 ? 0x3f80 : 0x3c00;
  std::fill(halves, halves + data.activations.size() / 2, one);
  std::fill(data.weights.begin(), data.weights.end(), static_cast<uint8_t>(zero));
  for (int64_t n = 0; n < 256; ++n) {
    const int64_t k = (n * 37 + place) % 128;
    data.weights[n * data.problem.rhs.free + k * data.problem.rhs.depth] = static_cast<uint8_t>(n);
  }
  std::vector<uint8_t> out;
  std::vector<float> amax;
  if (!RunOnce(device, c, data, out, amax)) return;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t n = 0; n < 256; ++n) {
      const auto code = static_cast<uint8_t>(n);
      const double want = Value(c.weight, &code, 0) - zero;
      const double got = Value(DType::kF32, out.data(), r * 256 + n);
      if (got == want || (got != got && want != want)) continue;
      char text[120];
      std::snprintf(text, sizeof text, "code %lld less %d gives %.9g, not %.9g",
                    static_cast<long long>(n), zero, got, want);
      Fail(c.Name(), text);
    }
  }
}

constexpr DType kWeights[] = {DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8};

void CheckAllCodes(const Device& device) {
  for (DType weight : kWeights) {
    for (DType wide : {DType::kBF16, DType::kF16}) {
      for (bool mn_major : {false, true}) {
        for (int64_t rows : {1, 9, 17, 64}) {
          Case c;
          c.rows = rows, c.weight = weight, c.wide = wide, c.mn_major = mn_major;
          for (int place : {0, 5, 70}) CheckCodes(device, c, 0, place);
          if (weight == DType::kS8) {
            for (int zero : {-128, -1, 127}) CheckCodes(device, c, zero, 3);
          } else if (weight == DType::kU8) {
            for (int zero : {1, 128, 255}) CheckCodes(device, c, zero, 3);
          }
        }
      }
    }
  }
}

void CheckShapes(const Device& device) {
  const int64_t shapes[][3] = {{1, 8, 128},    {1, 130, 4100},  {3, 257, 300},   {8, 128, 129},
                               {17, 200, 515}, {33, 96, 1024},  {64, 264, 260},  {65, 129, 256},
                               {130, 40, 384}, {1, 1, 1},       {2, 5, 7},       {16, 1000, 16},
                               {4, 128, 8192}, {64, 128, 4096}, {1, 3000, 2048}, {5, 3, 0}};
  for (const auto& shape : shapes) {
    for (DType weight : kWeights) {
      for (bool mn_major : {false, true}) {
        for (int variant = 0; variant < 4; ++variant) {
          Case c;
          c.rows = shape[0], c.columns = shape[1], c.depth = shape[2];
          if (c.rows * c.columns * c.depth > 20000000 && variant > 1) continue;
          c.weight = weight, c.mn_major = mn_major;
          c.wide = variant % 2 ? DType::kF16 : DType::kBF16;
          c.out = variant == 0 ? DType::kF32 : variant == 1 ? DType::kBF16 : DType::kF16;
          c.tile_free = variant == 2 ? 128 : variant == 3 ? 0 : 1;
          c.tile_depth = variant == 2 ? 128 : std::max<int64_t>(1, c.depth);
          c.zero_points = IsInt8(weight) && variant != 3 ? (variant == 1 ? 1000 : 127) : 0;
          c.bias = variant == 1, c.residual = variant == 2, c.row_scale = variant >= 2;
          c.swapped = variant == 1, c.shift = variant == 3 ? 3 : variant == 2 ? 4 : 0;
          c.rows_first = variant == 3;
          Check(device, c);
        }
      }
    }
  }
}

void CheckEpilogues(const Device& device) {
  for (Activation activation :
       {Activation::kRelu, Activation::kGeluTanh, Activation::kGeluErf, Activation::kSilu}) {
    for (DType out : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2,
                      DType::kS8, DType::kU8}) {
      for (bool swapped : {false, true}) {
        Case c;
        c.rows = swapped ? 12 : 7, c.columns = 132, c.depth = 640, c.swapped = swapped;
        c.out = out, c.activation = activation, c.tile_free = 1, c.tile_depth = 128;
        c.bias = c.residual = c.amax = true, c.out_scale = IsEightBit(out),
        c.amax_of_rows = swapped;
        Check(device, c);
      }
    }
  }
  Case batched;
  batched.batch = 3, batched.rows = 20, batched.columns = 144, batched.depth = 272;
  batched.tile_free = 128, batched.tile_depth = 128;
  Check(device, batched);
  Case deep;  // blocks share a tile, and scales change along K
  deep.rows = 30, deep.columns = 260, deep.depth = 4200, deep.tile_free = 1, deep.tile_depth = 256;
  deep.out = DType::kBF16, deep.residual = deep.bias = true;
  Check(device, deep);
  for (size_t workspace : {size_t{0}, size_t{20000}}) {  // too little for blocks to share tiles
    Case cramped;
    cramped.rows = 8, cramped.columns = 700, cramped.depth = 1500, cramped.workspace = workspace;
    Check(device, cramped);
  }
}

__global__ void FillRandom(uint32_t* words, int64_t count, DType type, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    if (type == DType::kE4M3 || type == DType::kE5M2) x &= 0xbfbfbfbfu;  // below 2: no NaN
    if (type == DType::kBF16) x = (x & 0x807f807fu) | 0x3f003f00u;
    words[i] = x;
  }
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Stopwatch {
  Stopwatch() {
    Require(cudaEventCreate(&start), "cudaEventCreate");
    Require(cudaEventCreate(&stop), "cudaEventCreate");
    Require(cudaStreamCreate(&stream), "cudaStreamCreate");
  }
  // Microseconds of one of `each` calls of `work`, the median of several rounds.
  template <typename F>
  double Time(int each, F work) {
    std::vector<double> times;
    for (int round = 0; round < 11; ++round) {
      Require(cudaEventRecord(start, stream), "cudaEventRecord");
      work();
      Require(cudaEventRecord(stop, stream), "cudaEventRecord");
      Require(cudaEventSynchronize(stop), "cudaEventSynchronize");
      float milliseconds = 0;
      Require(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
      if (round > 1) times.push_back(1000.0 * milliseconds / each);
    }
    return Median(times);
  }
  cudaEvent_t start, stop;
  cudaStream_t stream;
};

double CopyRate(Stopwatch& watch) {
  constexpr size_t kBytes = size_t{1} << 30;
  DeviceBytes from(kBytes), to(kBytes);
  Require(cudaMemset(from.at, 1, kBytes), "cudaMemset");
  const double us = watch.Time(1, [&] {
    Require(cudaMemcpyAsync(to.at, from.at, kBytes, cudaMemcpyDeviceToDevice, watch.stream),
            "copy");
  });
  return 2.0 * kBytes / us * 1e-3;
}

constexpr size_t kWorkspace = size_t{96} << 20;

struct Timed {
  double loop, graph;  // microseconds a call
};

// Times `each` calls that `loop` makes.
template <typename F>
Timed TimeLoop(Stopwatch& watch, int each, F loop) {
  Timed timed;
  timed.loop = watch.Time(each, loop);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  Require(cudaStreamBeginCapture(watch.stream, cudaStreamCaptureModeThreadLocal), "capture");
  loop();
  Require(cudaStreamEndCapture(watch.stream, &graph), "cudaStreamEndCapture");
  Require(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  timed.graph =
      watch.Time(each, [&] { Require(cudaGraphLaunch(exec, watch.stream), "cudaGraphLaunch"); });
  Require(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  Require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return timed;
}

Timed TimeProblem(const Device& device, Stopwatch& watch, const Problem& problem,
                  const DeviceBytes& pool, int sets, const DeviceBytes& rest) {
  std::string wrong;
  const auto plan = kSm80W8A16.plan(problem, device, kWorkspace, wrong);
  if (!plan) return Fail("timing", wrong), Timed{1, 1};
  Buffers b;
  b.workspace = rest.at, b.workspace_bytes = kWorkspace;
  b.lhs = rest.at + kWorkspace;
  b.rhs_scale = reinterpret_cast<const float*>(rest.at + kWorkspace + (size_t{8} << 20));
  b.out = rest.at + kWorkspace + (size_t{16} << 20);
  const size_t weights = static_cast<size_t>(problem.columns * problem.depth);
  const int each = std::max(sets, 24);
  const Timed timed = TimeLoop(watch, each, [&] {
    for (int i = 0; i < each && wrong.empty(); ++i) {
      b.rhs = pool.at + static_cast<size_t>(i % sets) * weights;
      wrong = plan->Run(b, watch.stream);
    }
  });
  if (!wrong.empty()) Fail("timing", wrong);
  return timed;
}

// bfloat16 times weights with a scale for each column.
Problem ProblemOf(int64_t rows, int64_t columns, int64_t depth, DType weight, bool mn_major) {
  Problem p;
  p.rows = rows, p.columns = columns, p.depth = depth;
  p.lhs.dtype = DType::kBF16, p.lhs.free = depth, p.lhs.depth = 1;
  p.rhs.dtype = weight, p.rhs.scale = true, p.rhs.tiles = {1, depth, 0, 1, 0};
  p.rhs.free = mn_major ? 1 : depth, p.rhs.depth = mn_major ? columns : 1;
  p.out = {DType::kBF16, rows * columns, columns, 1};
  return p;
}

void TimeAll(const Device& device) {
  Stopwatch watch;
  const double copy = CopyRate(watch);
  std::printf(
      "copy %.0f GB/s read + written; below: us a call in a loop and in a graph, and the weights' "
      "rate in the graph as a share of the copy's\n",
      copy);
  constexpr size_t kPool = size_t{768} << 20;
  DeviceBytes pool(kPool), rest(kWorkspace + (size_t{48} << 20));
  FillRandom<<<1024, 256>>>(reinterpret_cast<uint32_t*>(rest.at + kWorkspace), int64_t{12} << 20,
                            DType::kBF16, 7);
  struct Timing {
    int64_t columns, depth;
    DType weight;
    bool mn_major, blocks;
  };
  constexpr DType k4 = DType::kE4M3, k5 = DType::kE5M2, kI = DType::kS8;
  const Timing timings[] = {{14336, 4096, k4, false, false}, {14336, 4096, k4, true, false},
                            {14336, 4096, k4, false, true},  {14336, 4096, k5, false, false},
                            {14336, 4096, kI, false, false}, {14336, 4096, kI, true, false},
                            {28672, 8192, k4, false, false}, {28672, 8192, k4, true, false},
                            {6144, 4096, k4, false, false},  {4096, 14336, k4, false, false},
                            {4096, 14336, k4, true, false},  {4096, 4096, k4, false, false},
                            {8192, 8192, k4, false, false},  {1024, 4096, k4, false, false}};
  for (const Timing& t : timings) {
    FillRandom<<<1024, 256>>>(reinterpret_cast<uint32_t*>(pool.at), kPool / 4, t.weight, 3);
    std::printf("%5lldx%-5lld %-13s %s%s", static_cast<long long>(t.columns),
                static_cast<long long>(t.depth), NameOf(t.weight).data(),
                t.mn_major ? "[K,N]" : "[N,K]", t.blocks ? " 128x128" : "");
    for (int64_t rows : {1, 4, 16, 32, 64, 128, 256}) {
      Problem p = ProblemOf(rows, t.columns, t.depth, t.weight, t.mn_major);
      if (t.blocks) p.rhs.tiles = {128, 128, 0, p.depth / 128, 1};
      const auto bytes = static_cast<double>(p.columns * p.depth);
      const int sets = std::max(1, static_cast<int>(kPool / (p.columns * p.depth)));
      const Timed us = TimeProblem(device, watch, p, pool, sets, rest);
      std::printf(" | m%lld %.1f %.1f %.0f%%", static_cast<long long>(rows), us.loop, us.graph,
                  100 * bytes / us.graph * 1e-3 / copy);
    }
    std::printf("\n");
  }
}

#include "bench/w8a16_joint.inc"

int Main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  const Device device = ThisDevice();
  if (what != "time") {
    if (what != "small" && what != "joint") CheckAllCodes(device), CheckShapes(device);
    if (what != "joint") CheckEpilogues(device);
    CheckJoint(device);
    std::printf("%d checks, %d failures\n", checks, failures);
  }
  if (what == "" || what == "time") TimeAll(device);
  if (what == "" || what == "joint" || what == "time") TimeJoint(device);
  return failures != 0;
}

}  // namespace
}  // namespace jaxfp8::cuda::bench

int main(int count, char** words) { return jaxfp8::cuda::bench::Main(count, words); }
