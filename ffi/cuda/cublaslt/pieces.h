// The pieces of a product, multiplied by cuBLASLt one after the other. Pure.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "common/status.h"
#include "cuda/cublaslt/layout.h"

namespace jaxfp8::cuda {

// A range along each axis, for one library call.
struct Piece {
  int64_t batch, batches, row, rows, column, columns;
  int64_t start, depth;  // along K; the last piece includes the padding
};

// Calls `visit` for each piece until one fails. Columns are outside rows, so that a packed rhs
// serves all rows. K is innermost, so that the accumulators of one piece are finished before those
// of the next begin.
template <typename Visit>
Status ForEachPiece(const Problem& problem, const Layout& layout, const Visit& visit) {
  const PieceShape& s = layout.piece_shape;
  for (int64_t b = 0; b < problem.batch; b += s.batch) {
    for (int64_t c = 0; c < problem.columns; c += s.columns) {
      for (int64_t r = 0; r < problem.rows; r += s.rows) {
        for (int64_t k = 0; k < problem.depth; k += s.depth) {
          const bool last = k + s.depth >= problem.depth;
          JAXFP8_RETURN_IF_ERROR(visit(Piece{
              b, std::min(s.batch, problem.batch - b), r, std::min(s.rows, problem.rows - r), c,
              std::min(s.columns, problem.columns - c), k, last ? layout.depth - k : s.depth}));
        }
      }
    }
  }
  return {};
}

// Batches, rows, columns and depth of a piece.
using PieceSizes = std::array<int64_t, 4>;

inline PieceSizes SizesOf(const Piece& piece) {
  return {piece.batches, piece.rows, piece.columns, piece.depth};
}

// The sizes of the pieces along one axis: `step`, and a last one up to `end`.
inline std::vector<int64_t> SizesAlong(int64_t size, int64_t step, int64_t end) {
  if (size == 0) return {};
  const int64_t before = (size - 1) / step * step;
  if (before == 0 || end - before == step) return {end - before};
  return {step, end - before};
}

// The different sizes of the pieces of `ForEachPiece`.
inline std::vector<PieceSizes> DifferentSizes(const Problem& problem, const Layout& layout) {
  const PieceShape& s = layout.piece_shape;
  std::vector<PieceSizes> all;
  for (int64_t b : SizesAlong(problem.batch, s.batch, problem.batch)) {
    for (int64_t c : SizesAlong(problem.columns, s.columns, problem.columns)) {
      for (int64_t r : SizesAlong(problem.rows, s.rows, problem.rows)) {
        for (int64_t k : SizesAlong(problem.depth, s.depth, layout.depth)) {
          all.push_back({b, r, c, k});
        }
      }
    }
  }
  return all;
}

}  // namespace jaxfp8::cuda
