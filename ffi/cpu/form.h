// The canonical problem without data: the input of a route.
//
// It holds no pointer: a kernel can be chosen, and named to the user, for arrays not yet allocated.
// Its time and memory do not grow with the arrays.

#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/spec.h"

namespace jaxfp8 {

struct Axes;  // cpu/axes.h

// A kernel's arithmetic: float32 products in float32, bfloat16 products in float32, or 8-bit
// products exactly in int32.
enum class ComputeType : uint8_t { kFloat32, kBFloat16, kInt32 };

// The blocks of prepared columns: neighbouring columns, and depths of each.
inline constexpr int64_t kPreparedColumns = 64, kQuad = 4;

struct OperandForm {
  DType dtype = DType::kNone;
  bool zero_point = false;
  bool contiguous = false;  // whether lines are contiguous along K
  // Whether columns of the right side have the layout of `jaxfp8.prepare`: [..., columns / 64,
  // depth / 4, 64, 4] bytes.
  bool prepared = false;
  int64_t segments = 1;  // of K, each with a constant scale and zero point
};

struct Form {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
  OperandForm lhs, rhs;
  DType out = DType::kNone;
  bool swapped = false;  // whether lhs is the right side of the spec
  // Whether scales are moderate (HasModerateScales). Without data they are taken to be.
  bool moderate_scales = true;
};

// The form of a spec accepted by `CheckSpec`. The sides are swapped if the right one has few
// columns and the left one more rows: kernels stream the right side.
Form FormOf(const ScaledDotSpec& spec, const Axes& axes);

// Whether a side's scales or zero points hold for less than `shortest` of K, on average.
bool ChangesOften(const OperandForm& side, int64_t depth, int64_t shortest);
bool ChangesOften(const Form& form, int64_t shortest);

// Whether moderate scales make a difference.
bool AsksForScales(const Form& form);

// The shortest segment of K for scaling the accumulators. With shorter ones a kernel had better
// scale each value.
int64_t ShortSegment(const Form& form, ComputeType compute);

// Whether scales change too often for scaling the accumulators.
bool HasShortSegments(const Form& form, ComputeType compute);

}  // namespace jaxfp8
