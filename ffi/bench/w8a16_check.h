// Random problems for `sm80_w8a16`, their data, and the expected output in float64.

#ifndef JAXFP8_BENCH_W8A16_CHECK_H_
#define JAXFP8_BENCH_W8A16_CHECK_H_

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/activation.h"
#include "common/decode.h"
#include "cuda/kernels/common/element.cuh"
#include "cuda/path.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::bench {

inline void Require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAILED: %s\n", CudaError(status, what).c_str());
  std::exit(1);
}

inline uint32_t Random() {
  static uint64_t state = 0x9e3779b97f4a7c15ull;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<uint32_t>(state >> 32);
}
inline float Uniform() { return static_cast<float>(Random()) * 0x1p-31f - 1.0f; }

struct DeviceBytes {
  explicit DeviceBytes(size_t bytes) { Require(cudaMalloc(&at, bytes + 64), "cudaMalloc"); }
  DeviceBytes(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(at); }
  uint8_t* at = nullptr;
};

inline double Value(DType type, const uint8_t* bytes, int64_t i) {
  const auto* halves = reinterpret_cast<const uint16_t*>(bytes);
  switch (type) {
    case DType::kF32:
      return reinterpret_cast<const float*>(bytes)[i];
    case DType::kBF16:
      return DecodeBF16(halves[i]);
    case DType::kF16:
      return DecodeF16(halves[i]);
    case DType::kE4M3:
      return DecodeE4M3(bytes[i]);
    case DType::kE5M2:
      return DecodeE5M2(bytes[i]);
    case DType::kS8:
      return static_cast<int8_t>(bytes[i]);
    default:
      return bytes[i];
  }
}

struct Case {
  int64_t rows = 1, columns = 1, depth = 1, batch = 1;
  DType weight = DType::kE4M3, wide = DType::kBF16, out = DType::kF32;
  bool mn_major = false, swapped = false, rows_first = false;  // rows_first: lhs is [K, M]
  int64_t tile_free = 0, tile_depth = 0;                       // 0: no scale
  int zero_points = 0;                                         // the largest; 0: none
  bool row_scale = false, bias = false, residual = false, out_scale = false;
  bool amax = false, amax_of_rows = false;
  Activation activation = Activation::kNone;
  int shift = 0;  // bytes (of weights) and elements (of activations) off alignment
  size_t workspace = size_t{32} << 20;

  std::string Name() const {
    char text[256];
    std::snprintf(text, sizeof text,
                  "b%lld m%lld n%lld k%lld %s x %s%s%s%s -> %s tiles %lldx%lld z%d act%d shift%d",
                  static_cast<long long>(batch), static_cast<long long>(rows),
                  static_cast<long long>(columns), static_cast<long long>(depth),
                  NameOf(wide).data(), NameOf(weight).data(), mn_major ? " [K,N]" : " [N,K]",
                  swapped ? " swapped" : "", rows_first ? " [K,M]" : "", NameOf(out).data(),
                  static_cast<long long>(tile_free), static_cast<long long>(tile_depth),
                  zero_points, static_cast<int>(activation), shift);
    return text;
  }
};

// The data of a case; the 8-bit side is the rhs of `problem`.
struct Data {
  Problem problem;
  std::vector<uint8_t> weights, activations, residual;
  std::vector<float> scales, row_scales, bias, out_scales;
  std::vector<int32_t> zeros;

  explicit Data(const Case& c) {
    problem.batch = c.batch, problem.rows = c.rows, problem.columns = c.columns;
    problem.depth = c.depth, problem.activation = c.activation;
    const int64_t weight_batch = c.columns * c.depth, activation_batch = c.rows * c.depth;
    problem.rhs.dtype = c.weight;
    problem.rhs.batch = c.batch > 1 ? weight_batch : 0;
    problem.rhs.free = c.mn_major ? 1 : c.depth;
    problem.rhs.depth = c.mn_major ? c.columns : 1;
    problem.lhs.dtype = c.wide;
    problem.lhs.batch = c.batch > 1 ? activation_batch : 0;
    problem.lhs.free = c.rows_first ? 1 : c.depth;
    problem.lhs.depth = c.rows_first ? c.rows : 1;
    problem.out = {c.out, c.rows * c.columns, c.columns, 1};
    if (c.swapped) problem.out = {c.out, c.rows * c.columns, 1, c.rows};
    FillWeights(c);
    FillActivations(c);
    FillTiles(c);
    FillPlanes(c);
  }

  void FillWeights(const Case& c) {
    weights.resize(static_cast<size_t>(c.batch * c.columns * c.depth));
    for (uint8_t& code : weights) {
      do code = static_cast<uint8_t>(Random());
      while (!std::isfinite(Value(c.weight, &code, 0)));
    }
  }
  void FillActivations(const Case& c) {
    activations.resize(static_cast<size_t>(2 * c.batch * c.rows * c.depth));
    auto* halves = reinterpret_cast<uint16_t*>(activations.data());
    for (size_t i = 0; i < activations.size() / 2; ++i) {
      const float value = Uniform();
      halves[i] = c.wide == DType::kBF16 ? EncodeBF16(value) : EncodeF16(value);
    }
  }
  void FillTiles(const Case& c) {
    if (c.row_scale) {
      problem.lhs.scale = true;
      problem.lhs.tiles = {1, c.depth, 0, c.rows > 1 ? 1 : 0, 0};
      for (int64_t i = 0; i < c.rows; ++i) row_scales.push_back(0.5f + std::fabs(Uniform()));
    }
    if (c.tile_free == 0) return;
    const int64_t frees = (c.columns + c.tile_free - 1) / c.tile_free;
    const int64_t depths = (c.depth + c.tile_depth - 1) / c.tile_depth;
    Tiles& tiles = problem.rhs.tiles;
    tiles = {c.tile_free, c.tile_depth, c.batch > 1 ? frees * depths : 0, frees > 1 ? depths : 0,
             depths > 1 ? 1 : 0};
    problem.rhs.scale = true;
    problem.rhs.zero_point = c.zero_points != 0;
    for (int64_t i = 0; i < c.batch * frees * depths; ++i) {
      scales.push_back(0.01f * (1.0f + std::fabs(Uniform())));
      const int64_t reach = c.zero_points + (c.weight == DType::kS8 ? c.zero_points : 0) + 1;
      const int64_t zero = c.zero_points ? Random() % reach : 0;
      zeros.push_back(static_cast<int32_t>(zero - (c.weight == DType::kS8 ? c.zero_points : 0)));
    }
  }
  void FillPlanes(const Case& c) {
    if (c.bias) {
      problem.bias = {DType::kF32, 0, 0, 1};
      for (int64_t i = 0; i < c.columns; ++i) bias.push_back(Uniform());
    }
    if (c.residual) {
      problem.residual = {DType::kBF16, 0, c.columns, 1};
      residual.resize(static_cast<size_t>(2 * c.rows * c.columns));
      auto* halves = reinterpret_cast<uint16_t*>(residual.data());
      for (int64_t i = 0; i < c.rows * c.columns; ++i) halves[i] = EncodeBF16(Uniform());
    }
    if (c.out_scale) {
      problem.out_scale = {DType::kF32, 0, 1, 0};
      for (int64_t i = 0; i < c.rows; ++i)
        out_scales.push_back(0.05f + 0.05f * std::fabs(Uniform()));
    }
    if (c.amax) problem.amax = {DType::kF32, 0, c.amax_of_rows && c.rows > 1 ? 1 : 0, 0};
  }

  int64_t AmaxCount() const { return problem.amax.row ? problem.rows : 1; }

  struct Answer {
    double y,
        error;  // before the cast; the bound K * 2^-24 * sum |terms|, and the epilogue's share
  };
  Answer At(int64_t b, int64_t r, int64_t c) const {
    const Problem& p = problem;
    double sum = 0, size = 0;
    for (int64_t k = 0; k < p.depth; ++k) {
      const int64_t tile = p.rhs.tiles.At(b, c, k);
      double w =
          Value(p.rhs.dtype, weights.data(), b * p.rhs.batch + c * p.rhs.free + k * p.rhs.depth);
      if (p.rhs.zero_point) w -= zeros[tile];
      if (p.rhs.scale) w *= scales[tile];
      const double term = w * Value(p.lhs.dtype, activations.data(),
                                    b * p.lhs.batch + r * p.lhs.free + k * p.lhs.depth);
      sum += term, size += std::fabs(term);
    }
    const double row = p.lhs.scale ? row_scales[p.lhs.tiles.At(b, r, 0)] : 1.0;
    double error = (static_cast<double>(p.depth) + 8) * 0x1p-24 * size * row;
    sum *= row;
    if (p.residual) sum += Value(p.residual.dtype, residual.data(), p.residual.At(b, r, c));
    if (p.bias) sum += bias[p.bias.At(b, r, c)];
    const double y = Apply(p.activation, sum);
    error = 1.2 * error + 0x1p-21 * (std::fabs(sum) + std::fabs(y));
    return {y, error};
  }
};

// The rounding of an output type: half an ulp, relative to the value (`share`) and at least
// (`least`); the magnitude from which on it saturates to `most` or overflows.
struct Rounding {
  double share, least, most, overflow;
};
inline Rounding RoundingOf(DType type) {
  switch (type) {
    case DType::kBF16:
      return {0x1p-8, 0, INFINITY, 0x1.ffp127};
    case DType::kF16:
      return {0x1p-11, 0x1p-25, INFINITY, 65520};
    case DType::kE4M3:
      return {0x1p-4, 0x1p-10, 448, INFINITY};
    case DType::kE5M2:
      return {0x1p-3, 0x1p-17, 57344, INFINITY};
    case DType::kS8:
      return {0, 0.5, 127, INFINITY};
    case DType::kU8:
      return {0, 0.5, 255, INFINITY};
    default:
      return {0x1p-24, 0, INFINITY, 0x1.ffffffp127};
  }
}

}  // namespace jaxfp8::cuda::bench

#endif  // JAXFP8_BENCH_W8A16_CHECK_H_
