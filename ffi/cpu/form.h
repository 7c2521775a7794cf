// The canonical problem before there is data: all that a route may look at.
//
// It holds no pointer, so a kernel can be chosen, and named to the user, for arrays that do not
// exist; and nothing in it takes longer, or more memory, the larger they are.

#ifndef JAXFP8_CPU_FORM_H_
#define JAXFP8_CPU_FORM_H_

#include <cstdint>

#include "common/dtype.h"
#include "common/spec.h"

namespace jaxfp8 {

struct Axes;  // cpu/axes.h

// What a kernel computes in: float32 products in float32, bfloat16 products in float32, or 8-bit
// products exactly in int32.
enum class ComputeType : uint8_t { kFloat32, kBFloat16, kInt32 };

// Of prepared columns: how many lie side by side, and how many depths of each.
inline constexpr int64_t kPreparedColumns = 64, kQuad = 4;

struct SideForm {
  DType dtype = DType::kNone;
  bool zero_point = false;
  bool contiguous = false;  // whether lines lie along the depth, one value after the other
  // Whether columns, of the right side, lie as `jaxfp8.prepare` lays them: [..., columns / 64,
  // depth / 4, 64, 4] bytes.
  bool prepared = false;
  int64_t segments = 1;  // of the depth, along each of which scale and zero point are constant
};

struct Form {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
  SideForm lhs, rhs;
  DType out = DType::kNone;
  bool swapped = false;  // whether lhs is the right side of the spec
  // Whether scales are moderate (HasModerateScales): so they are taken to be until there is data.
  bool moderate_scales = true;
};

// The form of a spec that `CheckSpec` accepted. Sides change places where the right one has few
// columns, and the left one more rows: kernels stream the right side.
Form FormOf(const ScaledDotSpec& spec, const Axes& axes);

// Whether scales or zero points of a side change along the depth so often that they hold for less
// of it than `shortest`, on average.
bool ChangesOften(const SideForm& side, int64_t depth, int64_t shortest);
bool ChangesOften(const Form& form, int64_t shortest);

// Whether it matters if scales are moderate.
bool AsksForScales(const Form& form);

// Values between two changes of scale below which a kernel with such sums had better scale each.
int64_t ShortSegment(const Form& form, ComputeType compute);

// Whether scales change too often to scale such sums by them.
bool HasShortSegments(const Form& form, ComputeType compute);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_FORM_H_
