// Squares of 32-bit lanes transposed in registers: rows packed along K become columns.

#pragma once

#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// The lanes of two vectors interleaved: of their lower halves, and of their upper halves.
#if defined(__AVX512F__)
inline constexpr S32 kLowLanes = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
inline constexpr S32 kHighLanes = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
inline constexpr int kTransposeRounds = 4;
#elif defined(__AVX2__)
inline constexpr S32 kLowLanes = {0, 8, 1, 9, 2, 10, 3, 11};
inline constexpr S32 kHighLanes = {4, 12, 5, 13, 6, 14, 7, 15};
inline constexpr int kTransposeRounds = 3;
#else
inline constexpr S32 kLowLanes = {0, 4, 1, 5};
inline constexpr S32 kHighLanes = {2, 6, 3, 7};
inline constexpr int kTransposeRounds = 2;
#endif
static_assert(1 << kTransposeRounds == kLanes);

// to[g][i] = a[i][g] for kLanes lines of kLanes lanes. Only the first `count` g are stored. The
// pitch is in lanes.
[[gnu::always_inline]] inline void TransposeLanes(S32 (&a)[kLanes], int32_t* to, int64_t to_pitch,
                                                  int64_t count) {
  S32 b[kLanes];
  // Each perfect shuffle of all lanes moves one bit of the row number into the column number.
#pragma GCC unroll 4
  for (int round = 0; round < kTransposeRounds; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      b[2 * i] = __builtin_shuffle(a[i], a[i + kLanes / 2], kLowLanes);
      b[2 * i + 1] = __builtin_shuffle(a[i], a[i + kLanes / 2], kHighLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int g = 0; g < kLanes; ++g) {
    if (g < count) Store(to + g * to_pitch, a[g]);
  }
}

// The same for lines in memory.
inline void TransposeLanes(const int32_t* from, int64_t from_pitch, int32_t* to, int64_t to_pitch,
                           int64_t count) {
  S32 a[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = Load<S32>(from + i * from_pitch);
  TransposeLanes(a, to, to_pitch, count);
}

}  // namespace jaxfp8::JAXFP8_ISA
