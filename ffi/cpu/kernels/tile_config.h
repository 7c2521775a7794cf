// The state of a thread that works with the tiles of AMX: all eight of them whole.

#ifndef JAXFP8_CPU_KERNELS_TILE_CONFIG_H_
#define JAXFP8_CPU_KERNELS_TILE_CONFIG_H_

#include <cstdint>

namespace jaxfp8 {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row

// Only ever a constant: GCC 12 assumes that loading one reads its first eight bytes only, and
// leaves out what is stored behind them.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows,
                      kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_KERNELS_TILE_CONFIG_H_
