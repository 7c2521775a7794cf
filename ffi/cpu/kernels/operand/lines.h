// The lines of a block, each a contiguous run of values, whatever the layout of the operand.
//
// Contiguous lines are used in place. If lines are columns of contiguous bytes, the block is
// transposed into scratch, 16 x 16 or 16 x 64 bytes at a time in registers. Any other layout is
// copied value by value.

#pragma once

#include <algorithm>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/simd/vector.h"
#include "cpu/problem.h"

namespace jaxfp8::JAXFP8_ISA {

// Transposes 16 x 16 bytes: to[i][j] = from[j][i].
inline void Transpose16(const uint8_t* const (&from)[16], uint8_t* to, int64_t pitch) {
  constexpr U8x16 kLow = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  constexpr U8x16 kHigh = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  U8x16 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = Load<U8x16>(from[i]);
  // Four perfect shuffles of the 256 bytes exchange row and column numbers.
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = __builtin_shuffle(a[i], a[i + 8], kLow);
      b[2 * i + 1] = __builtin_shuffle(a[i], a[i + 8], kHigh);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) Store(to + i * pitch, a[i]);
}

#if defined(__AVX512F__)
// Transposes 16 x 64 bytes: to[i][j] = from[j][i] for i < 64.
inline void Transpose64(const uint8_t* const (&from)[16], uint8_t* to, int64_t pitch) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = Load<__m512i>(from[i]);
  // Four perfect shuffles of the 256 bytes of each 128-bit lane, as above.
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    Store(to + i * pitch, _mm512_castsi512_si128(a[i]));
    Store(to + (i + 16) * pitch, _mm512_extracti32x4_epi32(a[i], 1));
    Store(to + (i + 32) * pitch, _mm512_extracti32x4_epi32(a[i], 2));
    Store(to + (i + 48) * pitch, _mm512_extracti32x4_epi32(a[i], 3));
  }
}
#endif

class Lines {
 public:
  // `across` finds a line and `along` a value in it; both start at the given index.
  Lines(const uint8_t* base, int size, Offsets across, int64_t line, Offsets along, int64_t value)
      : size_(size), along_(along), value_(value) {
    if (across.table) {
      table_ = across.table + line;
      start_ = base;
    } else {
      pitch_ = across.stride * size;
      start_ = base + line * pitch_;
    }
    if (along.Contiguous()) start_ += value * size;
  }

  // Makes `count` lines of `length` values ready; `scratch` holds them if they must be transposed.
  void Prepare(int64_t count, int64_t length, uint8_t* scratch) {
    if (along_.Contiguous()) return;
    const int64_t pitch = (length * size_ + 15) / 16 * 16;
    if (size_ == 1 && !table_ && pitch_ == 1) {
      TransposeBytes(count, length, scratch, pitch);
    } else if (size_ == 1) {
      Copy<uint8_t>(0, count, 0, length, scratch, pitch);
    } else if (size_ == 2) {
      Copy<uint16_t>(0, count, 0, length, scratch, pitch);
    } else {
      Copy<uint32_t>(0, count, 0, length, scratch, pitch);
    }
    start_ = scratch;
    pitch_ = pitch;
    table_ = nullptr;
  }

  const uint8_t* operator[](int64_t i) const {
    return start_ + (table_ ? table_[i] * size_ : i * pitch_);
  }

  // How many of `count` lines are readable `width` values wide. Only `length` values belong to a
  // line: beyond its end lies another line, or the array ends.
  int64_t Readable(int64_t count, int64_t length, int64_t width) const {
    if (length == width) return count;
    if (table_ || pitch_ <= 0) return 0;
    const int64_t beyond = ((width - length) * size_ + pitch_ - 1) / pitch_;
    return std::max<int64_t>(count - beyond, 0);
  }

 private:
  // Of a value, before the lines are transposed.
  const uint8_t* Source(int64_t line, int64_t value) const {
    return (*this)[line] + along_[value_ + value] * size_;
  }

  // 16 values at a time: a core prefetches few streams.
  void TransposeBytes(int64_t count, int64_t length, uint8_t* to, int64_t pitch) const {
    const int64_t whole_lines = count / 16 * 16;
    const int64_t whole_values = length / 16 * 16;
    for (int64_t value = 0; value < whole_values; value += 16) {
      const uint8_t* from[16];
      for (int i = 0; i < 16; ++i) from[i] = Source(0, value + i);
      int64_t line = 0;
#if defined(__AVX512F__)
      for (; line + 64 <= count; line += 64) {
        Transpose64(from, to + line * pitch + value, pitch);
        for (int i = 0; i < 16; ++i) from[i] += 64;
      }
#endif
      for (; line < whole_lines; line += 16) {
        Transpose16(from, to + line * pitch + value, pitch);
        for (int i = 0; i < 16; ++i) from[i] += 16;
      }
    }
    Copy<uint8_t>(0, whole_lines, whole_values, length, to, pitch);
    Copy<uint8_t>(whole_lines, count, 0, length, to, pitch);
  }

  template <typename T>
  void Copy(int64_t line, int64_t line_end, int64_t value, int64_t value_end, uint8_t* to,
            int64_t pitch) const {
    for (int64_t v = value; v < value_end; ++v) {
      for (int64_t i = line; i < line_end; ++i) {
        std::memcpy(to + i * pitch + v * sizeof(T), Source(i, v), sizeof(T));
      }
    }
  }

  int size_;
  const uint8_t* start_;
  const int64_t* table_ = nullptr;  // of lines, in values from the start; or none, and
  int64_t pitch_ = 0;               // bytes from line to line
  Offsets along_;
  int64_t value_;
};

inline const uint8_t* BatchBase(const Operand& side, int64_t batch) {
  return side.values + side.batch[batch] * SizeOf(side.dtype);
}

// The lines of `block` along the depth: one per row or column of the operand.
inline Lines AlongDepth(const Operand& side, const Block& block) {
  return Lines(BatchBase(side, block.batch), SizeOf(side.dtype), side.free, block.first, side.depth,
               block.start);
}

// The lines of `block` across it: one per depth.
inline Lines AcrossDepth(const Operand& side, const Block& block) {
  return Lines(BatchBase(side, block.batch), SizeOf(side.dtype), side.depth, block.start, side.free,
               block.first);
}

// The starts of the lines across K read together by a GEMV, and of the next ones.
struct LinesTogether {
  LinesTogether(const Lines& lines, const Block& block, int64_t k) {
    const int64_t end = block.depth + block.ahead;
    for (int i = 0; i < kLinesTogether; ++i) {
      line[i] = lines[std::min(k + i, end - 1)];
      next[i] = lines[std::min(k + kLinesTogether + i, end - 1)];
    }
  }

  // Prefetches byte `at + ahead` of line i. Only `bytes` of a line are read: beyond them, it
  // prefetches the start of line i's successor.
  [[gnu::always_inline]] void Prefetch(int i, int64_t at, int64_t ahead, int64_t bytes) const {
    const int64_t beyond = at + ahead - bytes;
    __builtin_prefetch(beyond < 0 ? line[i] + at + ahead : next[i] + beyond);
  }

  const uint8_t *line[kLinesTogether], *next[kLinesTogether];
};

}  // namespace jaxfp8::JAXFP8_ISA
