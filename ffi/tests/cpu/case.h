// A scaled dot by its types, shapes and axes.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "tests/cpu/array.h"

namespace jaxfp8::tests {

struct SideCase {
  DType dtype = DType::kE4M3;
  Shape shape, contracting, batch, tiles;
  bool scale = false, zero_point = false;
  DType scale_type = DType::kF32, zero_type = DType::kS32;
  bool scale_rounded = false;  // float32 that counts as rounded to bfloat16

  Shape ScaleShape() const;
  Shape Free() const;  // axes
};

struct Case {
  SideCase lhs, rhs;
  std::optional<Shape> residual, bias, out_scale, amax;
  DType residual_dtype = DType::kF32, bias_dtype = DType::kF32;
  std::string activation = "none";
  DType out_dtype = DType::kF32;

  Shape OutShape() const;
  std::string Text() const;
};

}  // namespace jaxfp8::tests
