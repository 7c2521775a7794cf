// The canonical problem: every scaled dot as a batched product of rows and columns.
//
// Each axis of the dot belongs to one of four groups: batch, rows (free on the left), columns (free
// on the right), depth (contracted). Every operand is dense and row-major, so the offset of an
// element is a sum of one contribution per group. Transposed, permuted and shared operands thus
// need no case of their own, and no operand is ever copied as a whole.
//
// A batch axis along which the right side does not vary counts as rows, and the other way round:
// a weight that a batch shares is read once.

#ifndef JAXFP8_CPU_PROBLEM_H_
#define JAXFP8_CPU_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "common/activation.h"
#include "common/check.h"
#include "common/dtype.h"
#include "common/platform.h"
#include "common/spec.h"
#include "cpu/form.h"

namespace jaxfp8 {

// What one group adds to an offset, in elements: index * stride, or a table where that cannot say
// it; `run` entries of it are alike, from each multiple of that on.
struct Offsets {
  const int64_t* table = nullptr;
  int64_t stride = 0;
  int64_t run = 1;

  JAXFP8_HD int64_t operator[](int64_t i) const { return table ? table[i] : i * stride; }
  JAXFP8_HD bool Constant() const { return !table && stride == 0; }
  JAXFP8_HD bool Contiguous() const { return !table && stride == 1; }
};

// One side of the product. `free` is rows on the left and columns on the right.
struct Side {
  DType dtype = DType::kNone;
  const uint8_t* values = nullptr;
  Offsets batch, free, depth;
  bool prepared = false;  // as in SideForm

  const void* scale = nullptr;       // or none; of
  DType scale_type = DType::kF32;    // or bfloat16 or float16
  bool scale_rounded = false;        // float32 that counts as rounded to bfloat16
  int64_t scales = 0;                // how many
  const void* zero_point = nullptr;  // or none; of
  DType zero_type = DType::kS32;     // or int8 or uint8
  // Whether none is beyond kNearZero: of rows, for a kernel of integer sums, once `CutDepth` has
  // looked.
  bool near_zeros = false;
  Offsets tile_batch, tile_free, tile_depth;

  // Scales and zero points change so often along the depth that they belong to the single value.
  bool fine = false;

  // Whether lines lie along the depth, each for itself.
  JAXFP8_HD bool Along() const { return depth.Contiguous() && !prepared; }
};

// What differs from a byte by what 16 bits hold, times another in sums of 32 bits (Int16Pairs).
inline constexpr int32_t kNearZero = 255;

// Where the quads of prepared columns lie, from `column` and a whole number of quads on.
inline const uint8_t* PreparedAt(const Side& side, int64_t batch, int64_t column, int64_t depth) {
  return side.values + side.batch[batch] + side.free[column] + depth * kPreparedColumns;
}

// An array of the epilogue, addressed by output element.
struct Plane {
  void* data = nullptr;
  DType dtype = DType::kNone;
  Offsets batch, rows, columns;
};

struct Epilogue {
  Plane residual, bias, out_scale, amax, out;
  Activation activation = Activation::kNone;
};

struct Problem {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
  Side lhs, rhs;
  Epilogue epilogue;
  // Ends of the stretches of depth along which each coarse scale and zero point is constant.
  std::vector<int64_t> segments;
};

// Owns the tables that a Problem points into.
using Tables = std::vector<std::unique_ptr<int64_t[]>>;

// A spec that `CheckSpec` accepted, with its data.
Problem Canonical(const ScaledDotSpec& spec, const Axes& axes, const Form& form,
                  const Buffers& buffers, Tables& tables);

// Whether float32 holds sums of products times the scales of both sides where it holds the sums:
// scales of sums are 0, or at least 2^-30 and at most 1, or 2^30 where all values are of 8 bits.
bool HasModerateScales(const Problem& problem);

// Cuts the depth where scales or zero points change. A kernel of float32 sums, which can scale
// single values while it packs them, is spared stretches too short to pay; one of integers is told
// whether the zero points of rows are near.
void CutDepth(Problem& problem, const Form& form, ComputeType compute);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_PROBLEM_H_
