// Products with random operands for benchmarks of kernels: data on host and device, and the check
// of an output against float64. Included by one file of a program.

#ifndef JAXFP8_BENCH_PRODUCT_CASE_H_
#define JAXFP8_BENCH_PRODUCT_CASE_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/activation.h"
#include "cuda/device.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/problem.h"

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cuda;

int failures = 0, checks = 0;

void Must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(2);
}
void Must(const std::string& wrong) {
  if (wrong.empty()) return;
  std::printf("refused: %s\n", wrong.c_str());
  std::exit(2);
}

Device ThisDevice() {
  cudaDeviceProp properties;
  Must(cudaGetDeviceProperties(&properties, 0));
  Device device;
  device.compute_capability = 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = properties.sharedMemPerBlockOptin;
  return device;
}

// The same, and prints which one it is.
Device NamedDevice() {
  cudaDeviceProp properties;
  Must(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d multiprocessors\n", properties.name, properties.multiProcessorCount);
  return ThisDevice();
}

void Expect(bool right, const std::string& what) {
  ++checks;
  if (right) return;
  if (++failures <= 100) std::printf("WRONG: %s\n", what.c_str());
}

// Device memory, filled with a pattern or with given bytes.
struct Memory {
  explicit Memory(size_t bytes) : bytes(bytes) {
    Must(cudaMalloc(&data, bytes + 256));
    Must(cudaMemset(data, 0xa5, bytes + 256));
  }
  explicit Memory(const std::vector<uint8_t>& from) : Memory(from.size()) {
    Must(cudaMemcpy(data, from.data(), bytes, cudaMemcpyHostToDevice));
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data); }
  std::vector<uint8_t> Bytes() const {
    std::vector<uint8_t> to(bytes);
    Must(cudaDeviceSynchronize());
    Must(cudaMemcpy(to.data(), data, bytes, cudaMemcpyDeviceToHost));
    return to;
  }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data);
  }
  void* data = nullptr;
  size_t bytes;
};

std::mt19937_64 rng(7);

float ValueOf(DType type, const std::vector<uint8_t>& bytes, int64_t at) {
  return Visit<DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2, DType::kS8,
               DType::kU8, DType::kS32>(type, 0.0f, [&]<DType kType>() {
    Bits<kType> bits;
    std::memcpy(&bits, bytes.data() + at * sizeof(bits), sizeof(bits));
    return Decode<kType>(bits);
  });
}
void SetValue(DType type, std::vector<uint8_t>& bytes, int64_t at, float value) {
  Visit<DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8>(
      type, 0, [&]<DType kType>() {
        const Bits<kType> bits = Encode<kType>(value);
        std::memcpy(bytes.data() + at * sizeof(bits), &bits, sizeof(bits));
        return 0;
      });
}

// Finite codes of an 8-bit type, normal numbers of a wide one.
std::vector<uint8_t> RandomValues(DType type, int64_t count) {
  std::vector<uint8_t> bytes(count * SizeOf(type));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    if (IsWideFloat(type)) {
      SetValue(type, bytes, i, normal(rng));
    } else {
      do bytes[i] = static_cast<uint8_t>(rng());
      while (!std::isfinite(ValueOf(type, bytes, i)));
    }
  }
  return bytes;
}
std::vector<uint8_t> RandomFloats(int64_t count, float low, float high) {
  std::vector<uint8_t> bytes(count * 4);
  std::uniform_real_distribution<float> uniform(low, high);
  for (int64_t i = 0; i < count; ++i) SetValue(DType::kF32, bytes, i, uniform(rng));
  return bytes;
}
std::vector<uint8_t> RandomZeros(int64_t count, int low, int high) {
  std::vector<uint8_t> bytes(count * 4);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t zero = low + static_cast<int>(rng() % (high - low + 1));
    std::memcpy(bytes.data() + 4 * i, &zero, 4);
  }
  return bytes;
}
int32_t IntAt(const std::vector<uint8_t>& bytes, int64_t at) {
  int32_t value;
  std::memcpy(&value, bytes.data() + 4 * at, 4);
  return value;
}

// One side of a product with its arrays on host and device.
struct TestSide {
  Side side;
  std::vector<uint8_t> values, scale, zero;
  Memory *d_values = nullptr, *d_scale = nullptr, *d_zero = nullptr;

  TestSide(DType type, int64_t batch, int64_t lines, int64_t depth, bool mn_major, bool scaled,
           bool zeroed, int64_t tile_free, int64_t tile_depth) {
    side.dtype = type, side.batch = lines * depth;
    side.free = mn_major ? 1 : depth, side.depth = mn_major ? lines : 1;
    side.scale = scaled, side.zero_point = zeroed;
    const int64_t across = std::max<int64_t>(1, (depth + tile_depth - 1) / tile_depth);
    const int64_t down = (lines + tile_free - 1) / tile_free;
    side.tiles = {tile_free, tile_depth, across * down, down == 1 ? 0 : across,
                  across == 1 ? 0 : 1};
    values = RandomValues(type, batch * lines * depth);
    scale = RandomFloats(batch * across * down, 0.5f, 2.0f);
    zero = type == DType::kU8 ? RandomZeros(batch * across * down, 0, 255)
                              : RandomZeros(batch * across * down, -128, 127);
    d_values = new Memory(values), d_scale = new Memory(scale), d_zero = new Memory(zero);
  }
  TestSide(TestSide&& o) noexcept
      : side(o.side),
        values(std::move(o.values)),
        scale(std::move(o.scale)),
        zero(std::move(o.zero)),
        d_values(std::exchange(o.d_values, nullptr)),
        d_scale(std::exchange(o.d_scale, nullptr)),
        d_zero(std::exchange(o.d_zero, nullptr)) {}
  ~TestSide() { delete d_values, delete d_scale, delete d_zero; }

  // Zero points whose products need more than 32 bits.
  void MakeZerosFar() {
    for (size_t i = 0; i < zero.size() / 4; ++i) {
      const int32_t far = 100000 * IntAt(zero, static_cast<int64_t>(i));
      std::memcpy(zero.data() + 4 * i, &far, 4);
    }
    Must(cudaMemcpy(d_zero->data, zero.data(), zero.size(), cudaMemcpyHostToDevice));
  }

  double At(int64_t b, int64_t f, int64_t k) const {
    double v = ValueOf(side.dtype, values, b * side.batch + f * side.free + k * side.depth);
    if (side.zero_point) v -= IntAt(zero, side.tiles.At(b, f, k));
    if (side.scale) v *= ValueOf(DType::kF32, scale, side.tiles.At(b, f, k));
    return v;
  }
};

Plane MakePlane(DType type, int64_t batch, int64_t rows, int64_t columns, bool b, bool r, bool c) {
  (void)batch;
  const int64_t column = c ? columns : 1, row = r ? rows : 1;
  return {type, b ? row * column : 0, r ? column : 0, c ? 1 : 0};
}
int64_t CellsOf(const Plane& p, int64_t batch, int64_t rows, int64_t columns) {
  return (p.batch ? batch : 1) * (p.row ? rows : 1) * (p.column ? columns : 1);
}

// A product with its epilogue and the expected output.
struct Case {
  Problem p;
  TestSide lhs, rhs;
  std::vector<uint8_t> residual, bias, out_scale;
  std::string name;
  double rounded = 0;  // relative error of accumulators that are stored in a narrow type
  double lost = 0;     // error of the sum, relative to the sum of magnitudes
  int64_t every = 1;   // one output of so many is compared

  Case(std::string name, int64_t b, int64_t m, int64_t n, int64_t k, TestSide&& l, TestSide&& r)
      : lhs(std::move(l)), rhs(std::move(r)), name(std::move(name)) {
    p.batch = b, p.rows = m, p.columns = n, p.depth = k, p.lhs = lhs.side, p.rhs = rhs.side;
  }
  void Fill() {
    auto cells = [&](const Plane& plane) { return CellsOf(plane, p.batch, p.rows, p.columns); };
    if (p.residual) residual = RandomValues(p.residual.dtype, cells(p.residual));
    if (p.bias) bias = RandomFloats(cells(p.bias), -2, 2);
    if (p.out_scale) out_scale = RandomFloats(cells(p.out_scale), 1, 4);
  }
  // The epilogue in float64, and the error bound of float32.
  struct Wanted {
    double y = 0, slack = 0;
  };
  mutable std::unordered_map<int64_t, Wanted> wanted;  // what has been computed
  Wanted Before(int64_t b, int64_t r, int64_t c) const {
    auto [at, is_new] = wanted.try_emplace((b * p.rows + r) * p.columns + c);
    if (is_new) at->second = Compute(b, r, c);
    return at->second;
  }
  Wanted Compute(int64_t b, int64_t r, int64_t c) const {
    double sum = 0, magnitude = 0;
    const auto add = [&](double value) { sum += value, magnitude += std::fabs(value); };
    for (int64_t k = 0; k < p.depth; ++k) add(lhs.At(b, r, k) * rhs.At(b, c, k));
    const double absolute = rounded * std::fabs(sum) + lost * magnitude;
    if (p.residual) add(ValueOf(p.residual.dtype, residual, p.residual.At(b, r, c)));
    if (p.bias) add(ValueOf(DType::kF32, bias, p.bias.At(b, r, c)));
    // The bound of a sum in any order: 2^-24 for each rounding of a term. Activations have slopes
    // of up to 1.13 and a relative error of their own.
    const double y = Apply(p.activation, sum);
    const double roundings = static_cast<double>(p.depth) + 8;
    return {y, 1.2 * (roundings * 0x1p-24 * magnitude + absolute) + 4e-6 * std::fabs(y)};
  }
  // An output must lie between the encoded ends of the allowed interval, which covers rounding,
  // overflow and saturation.
  void Compare(const std::vector<uint8_t>& out, const std::vector<uint8_t>& amax) const {
    const DType type = p.out.dtype;
    const size_t cells = std::max<size_t>(1, amax.size() / 4);
    std::vector<double> least(cells, 0.0), most(cells, 0.0);
    int64_t wrong = 0, all = 0;
    std::string example;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t c = r % every; c < p.columns; c += every, ++all) {
          const auto [y, slack] = Before(b, r, c);
          if (p.amax) {
            const int64_t cell = p.amax.At(b, r, c);
            least[cell] = std::max(least[cell], std::fabs(y) - slack);
            most[cell] = std::max(most[cell], std::fabs(y) + slack);
          }
          const int64_t at = p.out.At(b, r, c);
          if (type == DType::kS32) {
            wrong += IntAt(out, at) !=
                     static_cast<int32_t>(static_cast<uint32_t>(static_cast<int64_t>(y)));
            continue;
          }
          const double scale =
              p.out_scale ? ValueOf(DType::kF32, out_scale, p.out_scale.At(b, r, c)) : 1.0;
          const double low = Coded(type, (y - slack) / scale);
          const double high = Coded(type, (y + slack) / scale), got = ValueOf(type, out, at);
          if (got >= low && got <= high) continue;
          if (wrong++ > 0) continue;
          example = ", such as " + std::to_string(got) + " at " + std::to_string(b) + "," +
                    std::to_string(r) + "," + std::to_string(c) + ", not in [" +
                    std::to_string(low) + ", " + std::to_string(high) + "]";
        }
      }
    }
    Expect(wrong == 0, name + ": " + std::to_string(wrong) + " of " + std::to_string(all) +
                           " outputs" + example);
    for (size_t i = 0; p.amax && i < cells; ++i) {
      const double got = ValueOf(DType::kF32, amax, static_cast<int64_t>(i));
      Expect(got >= least[i] * (1 - 1e-7) && got <= most[i] * (1 + 1e-7),
             name + ": amax " + std::to_string(got) + " not in [" + std::to_string(least[i]) +
                 ", " + std::to_string(most[i]) + "]");
    }
  }
  static double Coded(DType type, double value) {
    std::vector<uint8_t> code(4);
    SetValue(type, code, 0, static_cast<float>(value));
    return ValueOf(type, code, 0);
  }
  Buffers Bind(const Memory& res, const Memory& bia, const Memory& osc, const Memory& out,
               const Memory& amax) const {
    Buffers b;
    b.lhs = lhs.d_values->data, b.rhs = rhs.d_values->data;
    b.lhs_scale = lhs.d_scale->As<float>(), b.rhs_scale = rhs.d_scale->As<float>();
    b.lhs_zero_point = lhs.d_zero->As<int32_t>(), b.rhs_zero_point = rhs.d_zero->As<int32_t>();
    b.residual = res.data, b.bias = bia.As<float>(), b.out_scale = osc.As<float>();
    b.out = out.data, b.amax = amax.As<float>();
    return b;
  }
  // Runs `launch` on outputs filled with a pattern and compares.
  void Run(const std::function<void(const Buffers&)>& launch) {
    const Memory res(residual), bia(bias), osc(out_scale);
    const Memory out(p.batch * p.rows * p.columns * SizeOf(p.out.dtype));
    const Memory amax(p.amax ? CellsOf(p.amax, p.batch, p.rows, p.columns) * 4 : 0);
    launch(Bind(res, bia, osc, out, amax));
    Compare(out.Bytes(), amax.Bytes());
  }
};

}  // namespace

#endif  // JAXFP8_BENCH_PRODUCT_CASE_H_
