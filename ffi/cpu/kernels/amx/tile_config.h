// The tile state of a thread in an AMX kernel.

#pragma once

#include <cstdint>
#include <initializer_list>

namespace jaxfp8 {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row

// Tiles 0 to 3 are accumulators. Usually rows are tiles 4 and 5, columns 6 and 7, and `height` is
// the height of tiles 0 to 5. For transposed rows, columns are 4 and 5, rows 6 and 7, and
// accumulators and rows are `width` lanes wide.
//
// Always a constant: GCC 12 assumes a load of one to read its first eight bytes only.
struct alignas(64) TileConfig {
  constexpr explicit TileConfig(int height = kTileRows) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = kTileBytes;
      rows[tile] = static_cast<uint8_t>(tile < 6 ? height : kTileRows);
    }
  }

  static constexpr TileConfig Transposed(int width) {
    TileConfig config;
    for (int tile : {0, 1, 2, 3, 6, 7}) {
      config.row_bytes[tile] = static_cast<uint16_t>(width * sizeof(int32_t));
    }
    return config;
  }

  uint8_t palette = 1;
  uint8_t start = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace jaxfp8
