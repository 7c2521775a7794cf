// AMX in software: tiles of 16 rows of 64 bytes, and their products.

#pragma once

#include <cstdlib>

#include "tests/cpu/software/vector.h"

namespace jaxfp8 {

// Tiles: the state of a thread.
namespace software {

struct Tiles {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void LoadTile(int tile, const void* from, int64_t stride) {
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    const auto* line = static_cast<const uint8_t*>(from) + row * stride;
    std::memcpy(tiles.data[tile][row], line, tiles.config.row_bytes[tile]);
  }
}

inline void StoreTile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    auto* line = static_cast<uint8_t*>(to) + row * stride;
    std::memcpy(line, tiles.data[tile][row], tiles.config.row_bytes[tile]);
  }
}

inline void ZeroTile(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

// A half of a row: 8 groups of 32 bits.
template <typename Vector>
inline Vector HalfOf(int tile, int row, int half) {
  static_assert(sizeof(Vector) == 32);
  Vector vector;
  std::memcpy(&vector, tiles.data[tile][row] + 32 * half, sizeof vector);
  return vector;
}

template <typename Vector>
inline void StoreHalf(int tile, int row, int half, Vector vector) {
  std::memcpy(tiles.data[tile][row] + 32 * half, &vector, sizeof vector);
}

inline int32_t GroupOf(int tile, int row, int group) {
  int32_t bits;
  std::memcpy(&bits, tiles.data[tile][row] + 4 * group, sizeof bits);
  return bits;
}

// Four products of signed bytes per lane: those of even and of odd bytes, as 16 bits.
inline __m256i SignedDot(__m256i a, __m256i b) {
  const auto even = [](__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); };
  const auto odd = [](__m256i bytes) { return _mm256_srai_epi16(bytes, 8); };
  return _mm256_add_epi32(_mm256_madd_epi16(even(a), even(b)), _mm256_madd_epi16(odd(a), odd(b)));
}

// The instruction faults on tiles of other sizes.
inline void CheckSizes(int sums, int rows, int columns) {
  const auto& config = tiles.config;
  const bool fit = config.rows[sums] == config.rows[rows] &&
                   config.row_bytes[sums] == config.row_bytes[columns] &&
                   config.row_bytes[rows] == 4 * config.rows[columns];
  if (!fit) std::abort();
}

// sums[i] += rows[i][g] * columns[g], for the groups g of 32 bits of a row.
inline void DotBytes(int sums, int rows, int columns) {
  CheckSizes(sums, rows, columns);
  const int groups = tiles.config.row_bytes[rows] / 4;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < tiles.config.rows[sums]; ++i) {
      auto sum = HalfOf<__m256i>(sums, i, half);
      for (int g = 0; g < groups; ++g) {
        const __m256i row = _mm256_set1_epi32(GroupOf(rows, i, g));
        sum = _mm256_add_epi32(sum, SignedDot(row, HalfOf<__m256i>(columns, g, half)));
      }
      StoreHalf(sums, i, half, sum);
    }
  }
}

// Even and odd values are summed apart, then together, and then added.
inline void DotBF16(int sums, int rows, int columns) {
  CheckSizes(sums, rows, columns);
  const int groups = tiles.config.row_bytes[rows] / 4;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < tiles.config.rows[sums]; ++i) {
      __m256 even{}, odd{};
      for (int g = 0; g < groups; ++g) {
        const __m256i row = _mm256_set1_epi32(GroupOf(rows, i, g));
        const auto column = HalfOf<__m256i>(columns, g, half);
        even = FlushedProduct(even, LowerBF16(row), LowerBF16(column));
        odd = FlushedProduct(odd, UpperBF16(row), UpperBF16(column));
      }
      const __m256 both = Flush(_mm256_add_ps(even, odd));
      const __m256 before = Flush(HalfOf<__m256>(sums, i, half));
      StoreHalf(sums, i, half, Flush(_mm256_add_ps(before, both)));
    }
  }
}

}  // namespace software

JAXFP8_SOFT void _tile_loadconfig(const void* config) {
  std::memcpy(&software::tiles.config, config, sizeof software::tiles.config);
}
JAXFP8_SOFT void _tile_release() { software::tiles = {}; }

}  // namespace jaxfp8

// Macros where the compiler has them.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadd(tile, from, stride) jaxfp8::software::LoadTile(tile, from, stride)
#define _tile_stored(tile, to, stride) jaxfp8::software::StoreTile(tile, to, stride)
#define _tile_zero(tile) jaxfp8::software::ZeroTile(tile)
#define _tile_dpbssd(sums, rows, columns) jaxfp8::software::DotBytes(sums, rows, columns)
#define _tile_dpbf16ps(sums, rows, columns) jaxfp8::software::DotBF16(sums, rows, columns)
