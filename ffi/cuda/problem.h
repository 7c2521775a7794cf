// The canonical problem on a GPU: a batch of matrix products with an epilogue.
//
// The Python lowering (jaxfp8/_call/gpu/canonical.py) brings every scaled dot into this form: three
// axes on each side (batch, free, depth), row-major, the last two in either order. Offsets are
// products of an index and a stride, so no table is needed on the device.
//
//   lhs  [batch, M, K] or [batch, K, M]     free index = row of the output
//   rhs  [batch, N, K] or [batch, K, N]     free index = column of the output
//   out  [batch, M, N]
//
// The batch may be two axes, and those of a side may stand elsewhere, as (B, H) of a cache
// [B, T, H, D]. Where they have no common stride, a jump follows each run along the inner axis:
//
//   index (o, i) of the batch [outer, inner], b = o * inner + i,  is at  b * stride + o * jump
//
// A line of a side is all values of one free index: a row of lhs or a column of rhs.
//
// A Problem holds no pointers: a plan is made from it once and run with the buffers of each call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/platform.h"
#include "common/spec.h"
#include "common/status.h"

namespace jaxfp8::cuda {

// Where the scales and zero points of a side lie, one per tile. That of value (b, f, k) is at
// b * batch_stride + (f / tile_free) * free_stride + (k / tile_depth) * depth_stride, without
// jumps.
struct Tiles {
  int64_t tile_free = 1, tile_depth = 1;
  int64_t batch_stride = 0, free_stride = 0, depth_stride = 0;
  int64_t batch_jump = 0;  // for each index of the outer batch axis

  JAXFP8_HD int64_t At(int64_t b, int64_t f, int64_t k) const {
    return b * batch_stride + (f / tile_free) * free_stride + (k / tile_depth) * depth_stride;
  }
  // A stride is 0 where one tile spans the whole axis.
  JAXFP8_HD bool ConstantAlongDepth() const { return depth_stride == 0; }
  JAXFP8_HD bool ConstantAlongFree() const { return free_stride == 0; }
};

// One side of the product. Without jumps, value (b, f, k) is at
// b * batch_stride + f * free_stride + k * depth_stride, in elements. One of the last two is 1.
struct Side {
  DType dtype = DType::kNone;
  int64_t batch_stride = 0, free_stride = 0, depth_stride = 0;
  int64_t batch_jump = 0;  // for each index of the outer batch axis
  bool scale = false, zero_point = false;
  DType scale_type = DType::kF32;  // or bfloat16, float16, or uint8 for exponents
  bool scale_rounded = false;      // float32 scales are rounded to bfloat16 as they are read
  bool sums = false;               // the sum of each line is given: [batch, lines], or [lines]
  bool folded = false;             // codes are multiplied by the scale as they are decoded
  Tiles tiles;

  // [K, M] or [K, N], where the free axis is contiguous; else K is.
  JAXFP8_HD bool IsMnMajor() const { return depth_stride != 1; }
  // Whether one stride leads along the batch, in values and scales.
  bool HasOneBatchStride() const { return batch_jump == 0 && tiles.batch_jump == 0; }
  // Whether scales are float32 that counts as it is.
  bool HasPlainScales() const { return scale_type == DType::kF32 && !scale_rounded; }
  // Whether scales are bytes of float8_e8m0fnu: powers of two, or NaN.
  bool HasExponents() const { return scale && scale_type == DType::kU8; }
};

// An array of the epilogue. The value for output (b, r, c) is at
// b * batch_stride + r * row_stride + c * column_stride, in elements. dtype is kNone without one.
struct Plane {
  DType dtype = DType::kNone;
  int64_t batch_stride = 0, row_stride = 0, column_stride = 0;

  JAXFP8_HD explicit operator bool() const { return dtype != DType::kNone; }
  JAXFP8_HD int64_t At(int64_t b, int64_t r, int64_t c) const {
    return b * batch_stride + r * row_stride + c * column_stride;
  }
};

// Groups whose sizes are known on the device alone.
//
// Of rows: group g is multiplied by batch index g of rhs. lhs and out have no batch stride; `rows`
// counts the rows of all groups. Rows of no group have sums of 0, and no bias.
// Of the contracted axis: batch index g of out is the sum over group g. lhs and rhs have no batch
// stride; `depth` counts the values of all groups.
enum class Grouping : uint8_t {
  kNone,
  kContiguous,  // of rows, one group after the other, then rows of no group
  kMasked,      // of rows, rows / batch for each group, which has the first of them
  kContracted,  // of the contracted axis, one after the other, then what is of no group
};

struct Problem {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
  int64_t inner_batch = 1;  // size of the inner batch axis, where a side has jumps
  Side lhs, rhs;
  Plane residual, bias, out_scale, amax, out;
  Activation activation = Activation::kNone;
  bool highest = false;  // accumulate in full float32, where tensor cores could use less
  Grouping grouping = Grouping::kNone;
};

// The device pointers of one call; null where the problem has no array.
struct Buffers {
  const void *lhs = nullptr, *rhs = nullptr;
  const float* lhs_scale = nullptr;  // or of `Side::scale_type`
  const int32_t* lhs_zero_point = nullptr;
  const float* rhs_scale = nullptr;
  const int32_t* rhs_zero_point = nullptr;
  const int32_t *lhs_sums = nullptr, *rhs_sums = nullptr;
  const void* residual = nullptr;
  const float* bias = nullptr;
  const float* out_scale = nullptr;
  void* out = nullptr;
  float* amax = nullptr;
  const int32_t* group_sizes = nullptr;  // [batch], where the problem has groups
  void* workspace = nullptr;             // 256-byte aligned
  size_t workspace_bytes = 0;
};

// Whether rows are in groups: those of lhs, or of 16-bit values beside 8-bit weights on the left.
inline bool GroupsRows(const Problem& problem) {
  return problem.grouping == Grouping::kContiguous || problem.grouping == Grouping::kMasked;
}

// The types of both sides, as in "int8 and float8_e4m3fn".
std::string TypesOf(const Problem& problem);

// The lines of a side, of all batch indices that do not share them.
double LinesOf(const Problem& problem, const Side& side);

// The same product with groups of one size, as a batch: for estimates.
Problem WithEvenGroups(const Problem& problem);

// Why operands or results of groups are not as kernels take them.
Status WhyNotGroups(const Problem& problem);

// Makes the problem of a spec that `CheckSpec` has accepted. Fails if it is not canonical.
Status MakeProblem(const Request& request, Problem& problem);

// Whether codes of a side, as they are decoded to bfloat16, can be multiplied by its scale:
// exponents of eight values of K or more.
bool FoldsScale(const Side& side);
// The side after that: without a scale.
Side Folded(Side side);
// The same product with all such scales folded.
Problem WithFoldedScales(Problem problem);

// The same product with its sides exchanged: out^T = rhs^T lhs^T.
Problem Swapped(const Problem& problem);
Buffers Swapped(const Buffers& buffers);

}  // namespace jaxfp8::cuda
