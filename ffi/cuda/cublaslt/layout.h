// How a product is brought before cuBLASLt: in which types and layouts, in how many pieces, and
// where in the workspace everything between the operands and the output lies. Pure.
//
// The library counts in columns, we in rows: its A is our right side (m = columns), its B our left
// side (n = rows), and its column-major D (m x n) is our row-major output.

#ifndef JAXFP8_CUDA_CUBLASLT_LAYOUT_H_
#define JAXFP8_CUDA_CUBLASLT_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// What the library multiplies.
struct ProductTypes {
  DType lhs = DType::kNone, rhs = DType::kNone;  // FP8, int8, bfloat16 or float16
  DType sums = DType::kF32;                      // or int32
};

// Who applies the scales: our epilogue, or the library in one of its modes.
enum class Scaling : uint8_t { kEpilogue, kScalar, kOuterVectors, kBlocks };

// One attempt. Where the library has no algorithm for it, the next one is tried.
struct Attempt {
  Scaling scaling = Scaling::kEpilogue;
  bool padded = false;  // both sides packed, every size a multiple of 16
};

// The attempts that suit the problem, best first.
std::vector<Attempt> Attempts(const Problem& problem, const Device& device);

// A side as the library reads it.
struct SideLayout {
  bool packed = false;          // a copy in the workspace, made anew for each piece
  bool depth_major = false;     // in place and turned; 16-bit values only
  int64_t pitch = 0;            // elements from line to line
  int64_t batch = 0;            // elements from batch index to batch index
  bool sums = false;            // whether the sum of each line is needed
  bool arranged_scale = false;  // whether the scale is brought into the library's order first
  bool square_blocks = false;   // whether it is handed over by blocks of 128 x 128, else 1 x 128
};

// Sizes of the pieces; the last one along each axis may be smaller.
struct Steps {
  int64_t batch = 1, rows = 1, columns = 1, depth = 1;
};

// Offsets in the workspace, each a multiple of 256.
struct Places {
  size_t lhs = 0, rhs = 0, lhs_sums = 0, rhs_sums = 0, lhs_scale = 0, rhs_scale = 0;
  size_t sums = 0, totals = 0, constants = 0, library = 0, library_bytes = 0, end = 0;
};

// Whether the library rounds to FP8 itself where it can: 845 us, and 934 with a bfloat16 output and
// a cast (8192^3 on an H200).
inline constexpr bool kLibraryEncodes = true;

struct Layout {
  Attempt attempt;
  ProductTypes types;
  SideLayout lhs, rhs;
  Steps steps;
  Places places;
  int64_t depth = 0;     // of the product, padded where the sides are
  bool direct = false;   // the library writes the output itself
  bool encodes = false;  // and it is FP8, divided by a scale
  bool cut = false;      // pieces along the depth are scaled and added up in float32

  int64_t Padded(int64_t size) const { return attempt.padded ? (size + 15) / 16 * 16 : size; }
  // Elements from row to row of the sums of a piece.
  static int64_t SumsPitch(int64_t columns) { return (columns + 15) / 16 * 16; }
};

// Returns why there is no layout within `workspace` bytes, or "".
std::string MakeLayout(const Problem& problem, const ProductTypes& types, const Attempt& attempt,
                       size_t workspace, Layout& layout);

// What is multiplied at once: a stretch along each axis.
struct Piece {
  int64_t batch, batches, row, rows, column, columns;
  int64_t start, depth;  // the last one along the depth includes the padding
};

// Calls `visit` for each piece until one says what went wrong, and returns that. Columns are
// outside rows, so that what is made of the right side serves all rows; depth is innermost, so that
// sums are finished before the next are begun.
template <typename Visit>
std::string ForEachPiece(const Problem& problem, const Layout& layout, const Visit& visit) {
  const Steps& s = layout.steps;
  for (int64_t b = 0; b < problem.batch; b += s.batch) {
    for (int64_t c = 0; c < problem.columns; c += s.columns) {
      for (int64_t r = 0; r < problem.rows; r += s.rows) {
        for (int64_t k = 0; k < problem.depth; k += s.depth) {
          const bool last = k + s.depth >= problem.depth;
          const std::string wrong = visit(Piece{
              b, std::min(s.batch, problem.batch - b), r, std::min(s.rows, problem.rows - r), c,
              std::min(s.columns, problem.columns - c), k, last ? layout.depth - k : s.depth});
          if (!wrong.empty()) return wrong;
        }
      }
    }
  }
  return "";
}

// Depth blocks of the library's block scales.
inline constexpr int64_t kScaleBlock = 128;

// Floats of a vector of scales, or of 1 x 128 scales from one depth block to the next.
int64_t ScalePitch(int64_t lines);
// Floats of 128 x 128 scales from one block of lines to the next.
int64_t SquareScalePitch(int64_t depth);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_CUBLASLT_LAYOUT_H_
