// Specs of the C interface for fuzzing: valid ones in which a few fields are changed to anything
// that the C structures can hold.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "include/jaxfp8/jaxfp8.h"

namespace jaxfp8::tests {

struct WildSide {
  std::string dtype;
  std::vector<int64_t> shape, contracting, batch, tiles;
  int32_t scale = 0, zero_point = 0, sums = 0, scale_exponents = 0;
};

// Owns what a jaxfp8_scaled_dot_spec points to.
struct Wild {
  size_t struct_size = sizeof(jaxfp8_scaled_dot_spec);
  WildSide lhs, rhs;
  int32_t has_residual = 0, has_bias = 0, has_out_scale = 0, has_amax = 0;
  std::vector<int64_t> residual, bias, out_scale, amax;
  std::string residual_dtype, activation = "none", out_dtype = "float32";
  std::string precision = "default", kernel;
  bool null_dims = false;  // sizes without values, which is refused

  jaxfp8_scaled_dot_spec Spec() const {
    return {struct_size,
            SpecOf(lhs),
            SpecOf(rhs),
            {has_residual, has_bias, has_out_scale, has_amax, DimsOf(residual), DimsOf(bias),
             DimsOf(out_scale), DimsOf(amax), residual_dtype.c_str(), activation.c_str(),
             out_dtype.c_str()},
            precision.c_str(),
            kernel.c_str()};
  }

 private:
  jaxfp8_dims DimsOf(const std::vector<int64_t>& from) const {
    return {from.size(), null_dims ? nullptr : from.data()};
  }
  jaxfp8_operand_spec SpecOf(const WildSide& side) const {
    return {side.dtype.c_str(), DimsOf(side.shape), DimsOf(side.contracting),
            DimsOf(side.batch), DimsOf(side.tiles), side.scale,
            side.zero_point,    side.sums,          side.scale_exponents};
  }
};

inline std::string TextOf(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return "[" + text + "]";
}

inline std::string TextOf(const WildSide& side) {
  return side.dtype + TextOf(side.shape) + " contracting " + TextOf(side.contracting) + " batch " +
         TextOf(side.batch) + " tiles " + TextOf(side.tiles) + (side.scale ? " scaled" : "") +
         (side.scale_exponents ? " by exponents" : "") + (side.zero_point ? " zero points" : "") +
         (side.sums ? " with sums" : "");
}

inline std::string TextOf(const Wild& wild) {
  return TextOf(wild.lhs) + " x " + TextOf(wild.rhs) + " -> " + wild.out_dtype;
}

class Wilder {
 public:
  explicit Wilder(std::mt19937_64& random) : random_(random) {}

  // Changes one field, or two that belong together.
  void Change(Wild& wild) {
    WildSide& side = Below(2) ? wild.lhs : wild.rhs;
    WildSide& other = &side == &wild.lhs ? wild.rhs : wild.lhs;
    switch (Below(12)) {
      case 0:
      case 1:
        return Set(side.shape);
      case 2:
        return SetPair(side, other);
      case 3:
        return SetEmptyBesideLarge(side, other);
      case 4:
        return Set(side.tiles);
      case 5:
        return Reshape(Below(2) ? side.contracting : side.batch);
      case 6:
        return Reshape(Below(2) ? side.shape : side.tiles);
      case 7:
        return SetName(wild, side);
      case 8:
        return Flip(wild, side);
      case 9:
        return Reshape(*Pick<std::vector<int64_t>*>(
            {&wild.residual, &wild.bias, &wild.out_scale, &wild.amax}));
      case 10:
        return Set(*Pick<std::vector<int64_t>*>(
            {&wild.residual, &wild.bias, &wild.out_scale, &wild.amax}));
      default:
        if (Below(20) == 0) wild.struct_size = Below(300);
        if (Below(20) == 0) wild.null_dims = true;
        return Set(side.shape);
    }
  }

  int64_t Below(int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(random_); }

  template <typename T>
  T Pick(const std::vector<T>& from) {
    return from[Below(static_cast<int64_t>(from.size()))];
  }

  // A small size, or one near a power of two at which something may overflow.
  int64_t Size() {
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    if (Below(3) == 0) return Below(70);
    const int64_t powers[] = {15, 16, 30, 31, 32, 33, 40, 47, 48, 49, 50, 51, 61, 62};
    const int64_t power = int64_t{1} << powers[Below(std::size(powers))];
    return Pick<int64_t>({0, 0, 1, power, power, power - 1, power + 1, kMax, kMax - 1, -1,
                          std::numeric_limits<int64_t>::min()});
  }

 private:
  void Set(std::vector<int64_t>& sizes) {
    if (!sizes.empty()) sizes[Below(static_cast<int64_t>(sizes.size()))] = Size();
  }

  // Changes a contracted or batch axis of both sides.
  void SetPair(WildSide& side, WildSide& other) {
    const bool batch = Below(2);
    const auto &left = batch ? side.batch : side.contracting,
               &right = batch ? other.batch : other.contracting;
    if (left.empty() || left.size() != right.size()) return;
    const auto i = Below(static_cast<int64_t>(left.size()));
    const int64_t l = left[i], r = right[i], size = Size();
    if (l < 0 || r < 0 || l >= static_cast<int64_t>(side.shape.size())) return;
    if (r >= static_cast<int64_t>(other.shape.size())) return;
    side.shape[l] = other.shape[r] = size;
  }

  // Makes empty arrays, whose other axes may have any size.
  void SetEmptyBesideLarge(WildSide& side, WildSide& other) {
    SetPair(side, other);
    for (WildSide* one : {&side, &other}) {
      one->shape.insert(one->shape.begin(), Below(4) ? 0 : 1);
      one->tiles.insert(one->tiles.begin(), 1);
      for (auto* axes : {&one->contracting, &one->batch}) {
        for (int64_t& axis : *axes) axis += axis < std::numeric_limits<int64_t>::max();
      }
    }
  }

  void Reshape(std::vector<int64_t>& list) {
    if (list.empty() || Below(2)) {
      list.insert(list.begin() + Below(static_cast<int64_t>(list.size()) + 1),
                  Below(2) ? Below(4) : Size());
    } else {
      list.erase(list.begin() + Below(static_cast<int64_t>(list.size())));
    }
  }

  void SetName(Wild& wild, WildSide& side) {
    std::string& name =
        *Pick<std::string*>({&side.dtype, &side.dtype, &wild.residual_dtype, &wild.activation,
                             &wild.out_dtype, &wild.precision, &wild.kernel});
    name =
        Pick<std::string>({"float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float32", "bfloat16",
                           "float16", "int32", "none", "", "float4", "silu", "gelu_erf", "relu",
                           "highest", "scalar_f32", "general", std::string(300, 'x')});
  }

  void Flip(Wild& wild, WildSide& side) {
    int32_t& flag =
        *Pick<int32_t*>({&side.scale, &side.zero_point, &side.sums, &side.scale_exponents,
                         &wild.has_residual, &wild.has_bias, &wild.has_out_scale, &wild.has_amax});
    flag = flag ? 0 : static_cast<int32_t>(Pick<int64_t>({1, -1, 1 << 30}));
  }

  std::mt19937_64& random_;
};

}  // namespace jaxfp8::tests
