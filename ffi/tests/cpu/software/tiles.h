// AMX in software: tiles of 16 rows of 64 bytes, and their products.

#ifndef JAXFP8_TESTS_CPU_SOFTWARE_TILES_H_
#define JAXFP8_TESTS_CPU_SOFTWARE_TILES_H_

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

template <typename Vector>
inline Vector RowOf(int tile, int row) {
  Vector vector;
  std::memcpy(&vector, tiles.data[tile][row], sizeof vector);
  return vector;
}

inline int32_t GroupOf(int tile, int row, int group) {
  int32_t bits;
  std::memcpy(&bits, tiles.data[tile][row] + 4 * group, sizeof bits);
  return bits;
}

// Four products of signed bytes per lane.
inline U32x16 SignedDot(U32x16 a, U32x16 b) {
  U32x16 total{};
  for (int j = 0; j < 4; ++j) {
    total += (U32x16)(((S32x16)(a << (24 - 8 * j)) >> 24) * ((S32x16)(b << (24 - 8 * j)) >> 24));
  }
  return total;
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
  for (int i = 0; i < tiles.config.rows[sums]; ++i) {
    auto sum = RowOf<U32x16>(sums, i);
    for (int g = 0; g < tiles.config.row_bytes[rows] / 4; ++g) {
      const U32x16 row = U32x16{} + static_cast<uint32_t>(GroupOf(rows, i, g));
      sum += SignedDot(row, RowOf<U32x16>(columns, g));
    }
    std::memcpy(tiles.data[sums][i], &sum, sizeof sum);
  }
}

// Even and odd values are summed apart, then together, and then added.
inline void DotBF16(int sums, int rows, int columns) {
  CheckSizes(sums, rows, columns);
  const int groups = tiles.config.row_bytes[rows] / 4;
  F32x16 even_of[16], odd_of[16];
  for (int g = 0; g < groups; ++g) {
    const auto column = RowOf<U32x16>(columns, g);
    even_of[g] = Flush(As<F32x16>(column << 16));
    odd_of[g] = Flush(As<F32x16>(column & 0xffff0000u));
  }
  for (int i = 0; i < tiles.config.rows[sums]; ++i) {
    F32x16 even{}, odd{};
    for (int g = 0; g < groups; ++g) {
      const U32x16 row = U32x16{} + static_cast<uint32_t>(GroupOf(rows, i, g));
      even = Flush(Fused(even, Flush(As<F32x16>(row << 16)), even_of[g]));
      odd = Flush(Fused(odd, Flush(As<F32x16>(row & 0xffff0000u)), odd_of[g]));
    }
    const F32x16 sum = Flush(Flush(RowOf<F32x16>(sums, i)) + Flush(even + odd));
    std::memcpy(tiles.data[sums][i], &sum, sizeof sum);
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

#endif  // JAXFP8_TESTS_CPU_SOFTWARE_TILES_H_
