#include "cuda/workspace.h"

#include <algorithm>

namespace jaxfp8::cuda {
namespace {

// The numbers of jaxfp8/_workspace.py, where each has its reason.
constexpr double kMiB = 1 << 20;
constexpr double kLibraryBytes = 33 * kMiB;
constexpr double kMostBytes = 256 * kMiB;
constexpr double kSpareBytes = 64 * kMiB;
constexpr double kFewRows = 256;

double Lines(const Problem& problem, const Side& side) {
  const int64_t free = &side == &problem.lhs ? problem.rows : problem.columns;
  return static_cast<double>(side.batch == 0 ? 1 : problem.batch) * static_cast<double>(free);
}

double Copied(const Problem& problem, const Side& side) {
  const double width = IsEightBit(side.dtype) ? 2 : 0;
  return width * Lines(problem, side) * (static_cast<double>(problem.depth) + 16);
}

double Packed(const Problem& problem) {
  const Side &lhs = problem.lhs, &rhs = problem.rhs;
  const bool mixed = IsEightBit(lhs.dtype) != IsEightBit(rhs.dtype);
  const Side& wide = IsEightBit(lhs.dtype) ? rhs : lhs;
  const bool spare = !mixed || Lines(problem, wide) <= kFewRows;
  return std::min(spare ? kSpareBytes : kMostBytes, Copied(problem, lhs) + Copied(problem, rhs));
}

}  // namespace

// In double: sizes of an absurd problem must not overflow on the way to the minimum.
size_t WorkspaceFor(const Problem& problem) {
  double sums = 4.0 * static_cast<double>(problem.batch) * static_cast<double>(problem.rows) *
                static_cast<double>(problem.columns);
  if (IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype)) {
    sums = std::min(sums, kSpareBytes);
  }
  return static_cast<size_t>(kLibraryBytes + std::min(kMostBytes, Packed(problem) + sums));
}

}  // namespace jaxfp8::cuda
