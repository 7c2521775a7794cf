// A product as cuBLASLt receives it: types and layouts, the size of its pieces, and the offsets of
// the intermediate arrays in the workspace. Pure.
//
//   lhs [M, K] --- in place, or packed (kernels/pack) ---+
//                                                        +-- cuBLASLt --> output, or accumulators
//   rhs [N, K] --- in place, or packed ------------------+                      |
//                                                  out <-- kernels/epilogue <---+
//
// The library is column-major: its A is our rhs (m = columns), its B our lhs (n = rows), and its
// column-major D (m x n) is our row-major output.

#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "cuda/cublaslt/attempts.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// The library's types for operands and accumulators.
struct ProductTypes {
  DType lhs = DType::kNone, rhs = DType::kNone;  // FP8, int8, bfloat16 or float16
  DType accumulator = DType::kF32;               // or int32
};

// A side as the library reads it.
struct SideLayout {
  bool packed = false;           // from a copy in the workspace, made for each piece
  bool mn_major = false;         // in place and MN-major; 16-bit values only
  int64_t pitch = 0;             // elements from line to line
  int64_t batch_stride = 0;      // elements from batch index to batch index
  bool needs_line_sums = false;  // the epilogue needs the sum of each line, and it is not given
  bool takes_sums = false;       // it reads the sums that are given
  bool copies_scale = false;     // the scale is copied into the library's order first
  bool square_blocks = false;    // the scale belongs to blocks of 128 x 128, else 1 x 128
};

// Sizes of the pieces; the last one along each axis may be smaller.
struct PieceShape {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
};

// Offsets in the workspace, each a multiple of 256.
struct WorkspaceOffsets {
  size_t lhs = 0, rhs = 0, lhs_line_sums = 0, rhs_line_sums = 0, lhs_scale = 0, rhs_scale = 0;
  size_t accumulators = 0, scaled_accumulators = 0, reciprocal = 0, library = 0, library_bytes = 0,
         end = 0;
};

struct Layout {
  Attempt attempt;
  ProductTypes types;
  SideLayout lhs, rhs;
  PieceShape piece_shape;
  WorkspaceOffsets offsets;
  int64_t depth = 0;              // K of the product, padded if the sides are
  bool writes_output = false;     // the library writes the output itself
  bool quantizes_output = false;  // and rounds it to FP8, divided by a scale
  bool splits_depth = false;      // pieces of K are scaled and added up in float32

  int64_t Padded(int64_t size) const { return attempt.padded ? (size + 15) / 16 * 16 : size; }
  // Elements from row to row of the accumulators of a piece.
  static int64_t AccumulatorPitch(int64_t columns) { return (columns + 15) / 16 * 16; }
};

// Makes the layout of an attempt within `workspace` bytes.
Status MakeLayout(const Problem& problem, const ProductTypes& types, const Attempt& attempt,
                  size_t workspace, Layout& layout);

// How many floats a vector of scales takes, and 1 x 128 scales from one block of K to the next.
int64_t ScalePitch(int64_t lines);
// How many floats 128 x 128 scales take from one block of lines to the next.
int64_t SquareScalePitch(int64_t depth);

}  // namespace jaxfp8::cuda
