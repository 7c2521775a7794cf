// Transposes 128 x 128 bytes through shared memory, without bank conflicts.
//
//   registers: four words of     Transpose4x4Bytes       shared: a line has 32 words, rotated by a
//   four consecutive source      ----------------->      number that depends on the line; a word
//   rows                                                 is four consecutive source rows
//
// Readers take 8 runs of 16 bytes on each of 4 consecutive lines: the rotation must grow by 1 from
// line to line. Writers differ in the number of neighbouring lines of a thread: each writer has its
// own rotation.

#pragma once

#include <cstdint>

#include "common/platform.h"
#include "cuda/kernels/common/decode16.cuh"

namespace jaxfp8::cuda {

inline constexpr int kTransposeTile = 128;

// The word of a line, for `pack`: a warp writes lines 16 * (0..7) + i, and 4 neighbouring words of
// each.
JAXFP8_HD int PackSharedWord(int line, int word) {
  return line * (kTransposeTile / 4) + ((word + 4 * (line / 16) + line % 16) & 31);
}

// The same for writers (quantize) of which a warp writes lines 8 * (0..15) + i, and words w and
// w + 2 of each.
JAXFP8_HD int CodesSharedWord(int line, int word) {
  return line * (kTransposeTile / 4) + ((word + 4 * (line / 8 % 8) + line / 64 + line % 8) & 31);
}

// Four bytes of (low, high) by the nibbles of `selector`, as `PickBytes`. The compiler understands
// the intrinsic.
JAXFP8_HD uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  return PickBytes(low, high, selector);
#endif
}

// Transposes 4 x 4 bytes: byte j of word i goes to byte i of transposed[j].
JAXFP8_HD void Transpose4x4Bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                 uint32_t (&transposed)[4]) {
  const uint32_t low_ab = PermuteBytes(a, b, 0x5140), high_ab = PermuteBytes(a, b, 0x7362);
  const uint32_t low_cd = PermuteBytes(c, d, 0x5140), high_cd = PermuteBytes(c, d, 0x7362);
  transposed[0] = PermuteBytes(low_ab, low_cd, 0x5410);
  transposed[1] = PermuteBytes(low_ab, low_cd, 0x7632);
  transposed[2] = PermuteBytes(high_ab, high_cd, 0x5410);
  transposed[3] = PermuteBytes(high_ab, high_cd, 0x7632);
}

}  // namespace jaxfp8::cuda
