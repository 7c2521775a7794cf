// Arrays for any accepted spec, and buffers for messages.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "common/dtype.h"
#include "common/shapes.h"
#include "common/sizes.h"
#include "tests/wild.h"

namespace jaxfp8::tests {

// How many values an array has, as a double, which cannot overflow. An empty axis counts as
// `empty`.
inline double ValuesOf(const std::vector<int64_t>& shape, double empty) {
  double values = 1;
  for (int64_t size : shape) values *= size == 0 ? empty : static_cast<double>(size);
  return values;
}

// Whether an array has more bytes than is allowed.
inline bool IsBeyondLimits(const Wild& wild) {
  const double most = 2.0 * kMaxBytes;
  return ValuesOf(wild.lhs.shape, 1) > most || ValuesOf(wild.rhs.shape, 1) > most;
}

inline std::vector<int64_t> TilesOf(const WildSide& side) {
  std::vector<int64_t> counts;
  for (size_t i = 0; i < side.shape.size(); ++i) {
    counts.push_back(TileCount(side.shape[i], side.tiles[i]));
  }
  return counts;
}

inline std::vector<int64_t> SumsOf(const WildSide& side) {
  std::vector<int64_t> shape = side.shape;
  for (int64_t axis : side.contracting) shape[axis] = 1;
  return shape;
}

inline std::vector<int64_t> OutOf(const Wild& wild) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < wild.lhs.batch.size(); ++i) {
    const int64_t left = wild.lhs.shape[wild.lhs.batch[i]];
    out.push_back(left == 1 ? wild.rhs.shape[wild.rhs.batch[i]] : left);
  }
  for (const WildSide* side : {&wild.lhs, &wild.rhs}) {
    for (size_t i = 0; i < side->shape.size(); ++i) {
      const auto axis = static_cast<int64_t>(i);
      const bool free = !Contains(side->contracting, axis) && !Contains(side->batch, axis);
      if (free) out.push_back(side->shape[i]);
    }
  }
  return out;
}

// An allocation of exactly so many bytes, aligned to 256 bytes as device memory is.
class Block {
 public:
  explicit Block(int64_t bytes)
      : data_(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{256}))) {}
  uint8_t* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* data) const { ::operator delete(data, std::align_val_t{256}); }
  };
  std::unique_ptr<uint8_t, Free> data_;
};

// The arrays of an accepted spec.
class WildData {
 public:
  WildData(const Wild& wild, std::mt19937_64& random) : random_(random) {
    for (auto [side, values, scale, zero, sums] :
         {std::tuple(&wild.lhs, &to_.lhs, &to_.lhs_scale, &to_.lhs_zero_point, &to_.lhs_sums),
          std::tuple(&wild.rhs, &to_.rhs, &to_.rhs_scale, &to_.rhs_zero_point, &to_.rhs_sums)}) {
      *values = Values(side->dtype, side->shape);
      if (side->scale) {
        *scale = side->scale_exponents ? Exponents(TilesOf(*side)) : Scales(TilesOf(*side));
      }
      if (side->zero_point) *zero = Zeros(TilesOf(*side));
      if (side->sums) *sums = Zeros(SumsOf(*side));
    }
    if (wild.has_residual) to_.residual = Values(wild.residual_dtype, wild.residual);
    if (wild.has_bias) to_.bias = Scales(wild.bias);
    if (wild.has_out_scale) to_.out_scale = Scales(wild.out_scale);
    to_.out = Take(SizeOf(ParseDType(wild.out_dtype)), OutOf(wild));
    if (wild.has_amax) to_.amax = Take(sizeof(float), wild.amax);
    to_.struct_size = sizeof(to_);
  }

  // Without a workspace, which the caller may add.
  jaxfp8_scaled_dot_buffers& buffers() { return to_; }

  // Whether an accepted spec is small enough to compute.
  static bool IsSmall(const Wild& wild) {
    double depth = 1;
    for (int64_t axis : wild.lhs.contracting) depth *= static_cast<double>(wild.lhs.shape[axis]);
    const double values = ValuesOf(OutOf(wild), 0);
    if (values * std::max(depth, 1.0) > kMaxProducts) return false;
    double data = values;
    for (const WildSide* side : {&wild.lhs, &wild.rhs}) {
      data += ValuesOf(side->shape, 0) + (side->sums ? ValuesOf(SumsOf(*side), 0) : 0);
    }
    return 4 * data < kMaxData;
  }

 private:
  static constexpr double kMaxProducts = 1 << 21, kMaxData = 1 << 20;

  uint8_t* Take(int64_t bytes_each, const std::vector<int64_t>& shape) {
    return blocks_.emplace_back(bytes_each * CountOf(shape)).get();
  }
  const void* Values(const std::string& dtype, const std::vector<int64_t>& shape) {
    const int64_t bytes = SizeOf(ParseDType(dtype));
    uint8_t* values = Take(bytes, shape);
    for (int64_t i = 0; i < bytes * CountOf(shape); ++i) {
      values[i] = static_cast<uint8_t>(random_());
    }
    return values;
  }
  // Moderate scales: with these, the kernel that a route names without data is the one that runs.
  const void* Scales(const std::vector<int64_t>& shape) {
    auto* scales = reinterpret_cast<float*>(Take(sizeof(float), shape));
    for (int64_t i = 0; i < CountOf(shape); ++i) {
      scales[i] = std::ldexp(1.0f, -static_cast<int>(random_() % 20));
    }
    return scales;
  }
  const void* Exponents(const std::vector<int64_t>& shape) {
    uint8_t* exponents = Take(1, shape);
    for (int64_t i = 0; i < CountOf(shape); ++i) {
      exponents[i] = static_cast<uint8_t>(127 - random_() % 20);
    }
    return exponents;
  }
  const void* Zeros(const std::vector<int64_t>& shape) {
    auto* zeros = reinterpret_cast<int32_t*>(Take(sizeof(int32_t), shape));
    for (int64_t i = 0; i < CountOf(shape); ++i) zeros[i] = static_cast<int32_t>(random_() % 256);
    return zeros;
  }

  std::mt19937_64& random_;
  std::vector<Block> blocks_;
  jaxfp8_scaled_dot_buffers to_ = {};
};

// A buffer for a message, which must end within it.
class Message {
 public:
  explicit Message(size_t size) : size_(size), text_(new char[size]) {
    std::fill_n(text_.get(), size, '?');
  }
  char* data() const { return text_.get(); }
  size_t size() const { return size_; }
  bool IsEnded() const {
    return size_ == 0 || std::find(data(), data() + size_, 0) != data() + size_;
  }
  std::string text() const { return size_ > 0 && IsEnded() ? data() : ""; }

 private:
  size_t size_;
  std::unique_ptr<char[]> text_;
};

}  // namespace jaxfp8::tests
