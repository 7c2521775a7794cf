#include "cuda/cublaslt/pieces.h"

namespace jaxfp8::cuda {
namespace {

// The sizes of the pieces along one axis: `step`, and a last one up to `end`.
std::vector<int64_t> SizesAlong(int64_t size, int64_t step, int64_t end) {
  if (size == 0) return {};
  const int64_t before = (size - 1) / step * step;
  if (before == 0 || end - before == step) return {end - before};
  return {step, end - before};
}

}  // namespace

std::vector<PieceSizes> DifferentSizes(const Problem& problem, const Layout& layout) {
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
