// Turning 128 x 128 bytes through shared memory, without bank conflicts.
//
// In shared memory a line of 128 bytes is 32 words, rotated by a number that depends on the line:
// a word is four consecutive indices of the axis that becomes contiguous. Readers take 8 runs of 16
// bytes on each of 4 consecutive lines, and so need the rotation to grow by 1 from line to line.
// Writers differ in how many neighbouring lines a thread holds, and each has its rotation.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_TRANSPOSE_CUH_
#define JAXFP8_CUDA_KERNELS_COMMON_TRANSPOSE_CUH_

#include <cstdint>

#include "common/platform.h"

namespace jaxfp8::cuda {

inline constexpr int kTurn = 128;

// A warp writes lines 16 * (0..7) + i, and 4 neighbouring words of each.
JAXFP8_HD int PackedWord(int line, int word) {
  return line * (kTurn / 4) + ((word + 4 * (line / 16) + line % 16) & 31);
}

// A warp writes lines 8 * (0..15) + i, and words w and w + 2 of each.
JAXFP8_HD int CodeWord(int line, int word) {
  return line * (kTurn / 4) + ((word + 4 * (line / 8 % 8) + line / 64 + line % 8) & 31);
}

#ifdef __CUDACC__

// Four words of four bytes each, turned: byte j of word i goes to byte i of turned[j].
__device__ __forceinline__ void TurnFour(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                         uint32_t (&turned)[4]) {
  const uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
  const uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
  turned[0] = __byte_perm(low_ab, low_cd, 0x5410);
  turned[1] = __byte_perm(low_ab, low_cd, 0x7632);
  turned[2] = __byte_perm(high_ab, high_cd, 0x5410);
  turned[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_TRANSPOSE_CUH_
