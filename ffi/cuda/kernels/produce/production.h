// What makes the rows that a kernel quantises or encodes: a norm, or an activation and a factor.

#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"

namespace jaxfp8::cuda {

// What makes a row.
//   kElementwise  activation(x) * factor
//   kRmsNorm      c * inverse * gain + shift, c = x
//   kLayerNorm    the same, c = x - mean(x)
//   kCast         float32, rounded
enum class Producer : uint8_t { kElementwise, kRmsNorm, kLayerNorm, kCast };

// x and `factor` are [rows, columns], dense; `gain` and `shift` [columns].
struct Production {
  int64_t rows = 0, columns = 0;
  DType in = DType::kNone;  // bfloat16 or float16: the row that is made and, but for kCast, x
  Producer producer = Producer::kElementwise;
  Activation activation = Activation::kNone;  // its value is rounded to the type of the row
  bool has_factor = false;
  // Of a norm. The type of x, float32 or, where there is none, DType::kNone.
  DType gain = DType::kNone, shift = DType::kNone;
  bool rounded_first = false;   // what the gain multiplies is rounded to the type of x
  bool rounded_second = false;  // and so is what the shift is added to
};

// What rows are made of; null where there is none.
struct ProductionBuffers {
  const void *x = nullptr, *factor = nullptr, *gain = nullptr, *shift = nullptr;
};

}  // namespace jaxfp8::cuda
