// The canonical problem: every scaled dot as a batched product of rows and columns.
//
// Each axis of the dot belongs to one of four groups: batch, rows (free axes of lhs), columns (free
// axes of rhs), depth (the contracted axes, K). Every operand is dense and row-major: the offset of
// an element is the sum of one contribution per group. Transposed, permuted and broadcast operands
// need no case of their own, and no operand is ever copied as a whole.
//
// A batch axis counts as rows if rhs is broadcast along it, and as columns if lhs is. A weight
// common to a whole batch is thus read once.

#pragma once

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

// The contribution of one group to an offset, in elements: index * stride, or a table if no stride
// describes it. The table is constant over each aligned run of `run` entries.
struct Offsets {
  const int64_t* table = nullptr;
  int64_t stride = 0;
  int64_t run = 1;

  JAXFP8_HD int64_t operator[](int64_t i) const { return table ? table[i] : i * stride; }
  JAXFP8_HD bool Constant() const { return !table && stride == 0; }
  JAXFP8_HD bool Contiguous() const { return !table && stride == 1; }
};

// One operand of the product. `free` is the group of rows for lhs, and of columns for rhs.
struct Operand {
  DType dtype = DType::kNone;
  const uint8_t* values = nullptr;
  Offsets batch, free, depth;
  bool prepared = false;  // as in OperandForm

  const void* scale = nullptr;       // null: no scales
  DType scale_type = DType::kF32;    // or bfloat16, float16, or uint8 for exponents
  bool scale_rounded = false;        // the kernel rounds float32 scales to bfloat16
  int64_t scales = 0;                // number of scales or zero points
  const void* zero_point = nullptr;  // null: no zero points
  DType zero_type = DType::kS32;     // or int8 or uint8
  // Whether all zero points are within kNearZero. `CutDepth` sets it for rows of integer kernels.
  bool near_zeros = false;
  Offsets tile_batch, tile_free, tile_depth;

  // Scales and zero points change very often along K: packing scales the values one by one.
  bool fine = false;

  // Whether K is the contiguous axis.
  JAXFP8_HD bool Along() const { return depth.Contiguous() && !prepared; }
};

// The largest zero point of Int16Pairs: value - zero_point fits 16 bits, and pairs of products fit
// 32.
inline constexpr int32_t kNearZero = 255;

// The address of a prepared column at `depth`, a multiple of kQuad.
inline const uint8_t* PreparedAt(const Operand& side, int64_t batch, int64_t column,
                                 int64_t depth) {
  return side.values + side.batch[batch] + side.free[column] + depth * kPreparedColumns;
}

// An array of the epilogue, addressed by output element.
struct EpilogueArray {
  void* data = nullptr;
  DType dtype = DType::kNone;
  Offsets batch, rows, columns;
};

struct Epilogue {
  EpilogueArray residual, bias, out_scale, amax, out;
  Activation activation = Activation::kNone;
};

struct CanonicalDot {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
  Operand lhs, rhs;
  Epilogue epilogue;
  // The ends of the segments of K with constant scales and zero points. `fine` operands do not
  // count.
  std::vector<int64_t> segments;
};

// Owns the tables of a CanonicalDot.
using Tables = std::vector<std::unique_ptr<int64_t[]>>;

// The problem of a spec accepted by `CheckSpec`, with its buffers.
CanonicalDot Canonical(const ScaledDotSpec& spec, const Axes& axes, const Form& form,
                       const Buffers& buffers, Tables& tables);

// Whether scaling a float32 accumulator can neither overflow nor underflow: all scales are 0 or
// within [2^-30, 1], or within [2^-30, 2^30] if both operands are 8-bit.
bool HasModerateScales(const CanonicalDot& problem);

// Cuts K into segments at changes of scales or zero points. With float32 accumulators, an operand
// with segments too short to pay is marked `fine` instead. With integer ones, it sets `near_zeros`
// of the rows.
void CutDepth(CanonicalDot& problem, const Form& form, ComputeType compute);

}  // namespace jaxfp8
