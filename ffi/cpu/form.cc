#include "cpu/form.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/sizes.h"
#include "cpu/axes.h"

namespace jaxfp8 {
namespace {

// With fewer K values per segment, scaling each value beats scaling each sum. Up to a K of kShallow
// the sums win again, because they are scaled in float64.
constexpr int64_t kShortSegment = 16;
constexpr int64_t kShallow = 64;
// From this many rows on segments of 32 values are short, too (MX formats have these): the rows
// share the scaled values. Kernels of bfloat16 are twice as fast, and only segments of 16 are short
// for them. (256 rows are 1.3 to 2x faster.)
constexpr int64_t kSharedScalesRows = 128;
constexpr int64_t kShortOfFloats = 33, kShortOfHalves = 24;

// With this few columns, and more rows, the sides are swapped: kernels stream the right side, and a
// register tile has up to 64 columns.
constexpr int64_t kSwapColumns = 64;

bool IsContiguous(const std::vector<Digit>& digits) {
  return digits.size() == 1 && digits[0].tile == 1 && digits[0].stride == 1;
}

bool HasSizeAndStride(const Digit& digit, int64_t size, int64_t stride) {
  return digit.size == size && digit.stride == stride;
}

// Whether an array of bytes has the strides of a prepared weight.
bool ArePrepared(const std::vector<Digit>& free, const std::vector<Digit>& depth) {
  if (free.empty() || !HasSizeAndStride(free.back(), kPreparedColumns, kQuad)) return false;
  if (depth.empty() || !HasSizeAndStride(depth.back(), kQuad, 1)) return false;
  return depth.size() == 1 || (depth.size() == 2 && depth[0].stride == kPreparedColumns * kQuad);
}

OperandForm MakeOperand(const OperandSpec& spec, const OperandAxes& axes) {
  OperandForm side;
  side.dtype = ParseDType(spec.dtype);
  side.zero_point = spec.zero_point;
  side.contiguous = IsContiguous(axes.depth);
  side.prepared = IsEightBit(side.dtype) && ArePrepared(axes.free, axes.depth);
  side.segments = CountSegments(axes.tile_depth);
  return side;
}

}  // namespace

Form FormOf(const ScaledDotSpec& spec, const Axes& axes) {
  Form form;
  form.batch = Size(axes.groups.batch);
  form.rows = Size(axes.groups.rows);
  form.columns = Size(axes.groups.columns);
  form.depth = Size(axes.groups.depth);
  form.lhs = MakeOperand(spec.lhs, axes.lhs);
  form.rhs = MakeOperand(spec.rhs, axes.rhs);
  form.out = ParseDType(spec.epilogue.out_dtype);
  form.swapped = form.rows > form.columns && form.columns <= kSwapColumns && !form.rhs.prepared;
  if (form.swapped) {
    std::swap(form.rows, form.columns);
    std::swap(form.lhs, form.rhs);
  }
  return form;
}

bool ChangesOften(const OperandForm& side, int64_t depth, int64_t shortest) {
  return depth > kShallow && depth < Times(side.segments, shortest);
}

bool ChangesOften(const Form& form, int64_t shortest) {
  return ChangesOften(form.lhs, form.depth, shortest) ||
         ChangesOften(form.rhs, form.depth, shortest);
}

bool AsksForScales(const Form& form) {
  return form.rows >= kSharedScalesRows &&
         ChangesOften(form, std::max(kShortOfFloats, kShortOfHalves));
}

// Segments above kShortSegment count as short only if float32 holds the scaled values.
int64_t ShortSegment(const Form& form, ComputeType compute) {
  if (form.rows < kSharedScalesRows || compute == ComputeType::kInt32) return kShortSegment;
  const int64_t longer = compute == ComputeType::kFloat32 ? kShortOfFloats : kShortOfHalves;
  return ChangesOften(form, longer) && !form.moderate_scales ? kShortSegment : longer;
}

bool HasShortSegments(const Form& form, ComputeType compute) {
  return ChangesOften(form, ShortSegment(form, compute));
}

}  // namespace jaxfp8
