// The attempts of cuBLASLt at a problem, and their order. Pure.

#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda {

// Who applies the scales: our epilogue, or the library in one of its modes.
enum class Scaling : uint8_t { kEpilogue, kScalar, kOuterVectors, kBlocks };

// One way to hand a problem to the library. If the library has no algorithm for it, the next is
// tried.
struct Attempt {
  Scaling scaling = Scaling::kEpilogue;
  bool padded = false;  // both sides packed, every size a multiple of 16
};

// The attempts for the problem, best first.
std::vector<Attempt> Attempts(const Problem& problem, const Device& device);

// K of one block of the library's block scales.
inline constexpr int64_t kScaleBlock = 128;

// Whether scales or zero points of a side change along K.
bool VariesAlongDepth(const Side& side);

// Whether the library does everything after the scaled sum as exactly as our epilogue. Its bias has
// 16 bits. Its ReLU keeps NaN: tried for all FP8 algorithms with scales of whole tensors on an
// H100, cuBLASLt 13.1, and for no others. Its GELU of -infinity is not JAX's.
bool LibraryCanFinish(const Problem& problem);

// Whether the library can round to FP8 itself, which is 1.1x faster than a bfloat16 output and a
// cast (8192^3 on an H200). It multiplies by the reciprocal of one scale: a value moves to the
// neighbouring code at most. It takes the amax before the scale, and gives NaN if any value is NaN.
bool LibraryCanQuantize(const Problem& problem);

// Whether the output is the bare sum of integers.
bool IsBareIntegerSum(const Problem& problem);

}  // namespace jaxfp8::cuda
