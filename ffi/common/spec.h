// The problem as the caller states it, the C++ twin of `jaxfp8/_value/spec.py`: the same fields in
// the same order. docs/custom_call.md describes the attributes that carry them.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "common/dtype.h"

namespace jaxfp8 {

using Dims = std::span<const int64_t>;

// One side of the product: `(values - zero_point) * scale`.
struct OperandSpec {
  std::string_view dtype;
  Dims shape;
  Dims contracting;
  Dims batch;
  Dims tiles;
  bool scale = false;
  bool zero_point = false;
  bool scale_rounded = false;  // the scale is rounded to bfloat16 as it is read
  bool sums = false;           // the sums of the values over the contracted axes are given
  // The scale is given as bytes of float8_e8m0fnu: 2^(byte - 127).
  bool scale_exponents = false;
};

// `y = activation(sum + residual + bias)`; `amax = max |y|`; `out = cast(y / out_scale)`.
struct EpilogueSpec {
  bool has_residual = false;
  Dims residual;
  std::string_view residual_dtype;
  bool has_bias = false;
  Dims bias;
  std::string_view activation;
  std::string_view out_dtype;
  bool has_out_scale = false;
  Dims out_scale;
  bool has_amax = false;
  Dims amax;
};

struct ScaledDotSpec {
  OperandSpec lhs;
  OperandSpec rhs;
  EpilogueSpec epilogue;
  std::string_view precision;
};

// Calls `visit` with the name and the value of each field, in the order above.
template <class Spec, class Visit>
void EachFieldOfSide(Spec& side, Visit&& visit) {
  visit("dtype", side.dtype), visit("shape", side.shape), visit("contracting", side.contracting);
  visit("batch", side.batch), visit("tiles", side.tiles), visit("scale", side.scale);
  visit("zero_point", side.zero_point), visit("scale_rounded", side.scale_rounded);
  visit("sums", side.sums), visit("scale_exponents", side.scale_exponents);
}

template <class Epilogue, class Visit>
void EachFieldOfEpilogue(Epilogue& epilogue, Visit&& visit) {
  visit("has_residual", epilogue.has_residual), visit("residual", epilogue.residual);
  visit("residual_dtype", epilogue.residual_dtype), visit("has_bias", epilogue.has_bias);
  visit("bias", epilogue.bias), visit("activation", epilogue.activation);
  visit("out_dtype", epilogue.out_dtype), visit("has_out_scale", epilogue.has_out_scale);
  visit("out_scale", epilogue.out_scale), visit("has_amax", epilogue.has_amax);
  visit("amax", epilogue.amax);
}

// A whole call, as its attributes state it, and the types of the scales that came with it.
struct Request {
  ScaledDotSpec spec;
  std::string_view kernel;  // "" lets the library choose
  DType lhs_scale_type = DType::kF32, rhs_scale_type = DType::kF32;
};

}  // namespace jaxfp8
