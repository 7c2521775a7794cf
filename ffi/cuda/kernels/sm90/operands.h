// How the Hopper kernels read their operands: in place, or as copies in the workspace. Pure.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/problem.h"

namespace jaxfp8::cuda::sm90 {

// Bytes to which pointers and pitches of operands are multiples.
inline constexpr int64_t kOperandAlignment = 16;

// A side as lines of K, with sizes and pitches in bytes. It is copied where its lines are not
// contiguous, or not aligned. Its lines are summed where the other side has zero points and the
// sums are not given. 8-bit weights beside 16-bit values may be lines of N, too, and nothing is
// summed for them.
struct TmaOperand {
  Side side;
  int64_t lines = 0, depth = 0;  // depth: in elements
  int64_t batches = 1;           // 1 where every batch index shares it
  bool copied = false, summed = false;
  bool mn_major = false;       // read as lines of N
  size_t at = 0, sums_at = 0;  // of the copy and the int32 sums in the workspace

  int64_t LineBytes() const;
  int64_t LinePitch() const;  // of lines of N, too
  int64_t BatchPitch() const;
  size_t CopiedBytes() const;
  size_t SumsBytes() const;
};

struct TmaOperands {
  TmaOperand lhs, rhs;
  size_t workspace = 0;  // bytes of copies and sums
};

TmaOperands OperandsOf(const Problem& problem);

// Whether one side has 8 bits, the weights, and the other one 16. Then the kernel has them on the
// left, and computes the transposed output.
bool IsMixed(const Problem& problem);
bool HasWeightsOnRight(const Problem& problem);
Problem WithWeightsOnLeft(const Problem& problem);

}  // namespace jaxfp8::cuda::sm90
