#include "cuda/workspace.h"

#include <algorithm>

namespace jaxfp8::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
// What NVIDIA recommends for cuBLASLt on Hopper, and some for alignment.
constexpr size_t kLibraryBytes = 33 * kMiB;
// Copies and sums beyond this are made piece by piece.
constexpr double kMostIntermediateBytes = 256.0 * kMiB;

double RoundUp(int64_t size, int64_t unit) {
  return static_cast<double>((size + unit - 1) / unit * unit);
}

}  // namespace

// In double: sizes of an absurd problem must not overflow on the way to the minimum.
size_t WorkspaceFor(const Problem& problem) {
  const double batch = static_cast<double>(problem.batch);
  const double rows = RoundUp(problem.rows, 16), columns = RoundUp(problem.columns, 16);
  const double depth = RoundUp(problem.depth, 128);
  const double packed = 2 * (rows + columns) * depth;
  const double sums = 8 * rows * columns;
  const double lines = 8 * (rows + columns) * (1 + depth / 128);
  const double wanted = batch * (packed + sums + lines);
  return kLibraryBytes + static_cast<size_t>(std::min(wanted, kMostIntermediateBytes));
}

}  // namespace jaxfp8::cuda
