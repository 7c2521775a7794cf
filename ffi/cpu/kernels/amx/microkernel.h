// Products of tiles by AMX, of the panels of other kernels: 64 bytes each of 16 packed rows are a
// tile as they lie, and so are 16 groups of a strip, of 16 columns each.

#ifndef JAXFP8_CPU_KERNELS_AMX_MICROKERNEL_H_
#define JAXFP8_CPU_KERNELS_AMX_MICROKERNEL_H_

#include "cpu/kernels/amx/tile_config.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"

namespace jaxfp8::JAXFP8_ISA {

inline constexpr int kTile = kTileRows;  // groups of depth and columns, too
static_assert(kBytes == kTileBytes);

// Configurations by how many rows tiles have.
struct TileConfigs {
  constexpr TileConfigs() {
    for (int rows = 1; rows <= kTile; ++rows) {
      of[rows] = TileConfig(rows);
      turned[rows] = TileConfig::Turned(rows);
    }
  }
  TileConfig of[kTile + 1], turned[kTile + 1];
};
inline constexpr TileConfigs kTileConfigs;

inline void EnterTiles(int height) { _tile_loadconfig(&kTileConfigs.of[height]); }

inline void EnterTurnedTiles(int rows) { _tile_loadconfig(&kTileConfigs.turned[rows]); }

inline void LeaveTiles() { _tile_release(); }

// Between stores and what loads them as tiles, and the other way round: GCC does not know that it
// reads memory.
inline void TileFence() { asm volatile("" ::: "memory"); }

// Tiles 0 and 1 are the sums that are found from `one` and `one + kTile` on, 2 and 3 those from
// `other`.
template <typename T>
inline void LoadSums(const T* one, const T* other, int64_t bytes, bool first) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    TileFence();
    _tile_loadd(0, one, bytes);
    _tile_loadd(1, one + kTile, bytes);
    _tile_loadd(2, other, bytes);
    _tile_loadd(3, other + kTile, bytes);
  }
}

template <typename T>
inline void StoreSums(T* one, T* other, int64_t bytes) {
  _tile_stored(0, one, bytes);
  _tile_stored(1, one + kTile, bytes);
  _tile_stored(2, other, bytes);
  _tile_stored(3, other + kTile, bytes);
}

// Tile numbers are part of the instructions, and must be literals.
#define JAXFP8_DOT(sums, rows, columns)  \
  if constexpr (Sums::kExact) {          \
    _tile_dpbssd(sums, rows, columns);   \
  } else {                               \
    _tile_dpbf16ps(sums, rows, columns); \
  }

// Adds the rows of a tile times a strip, `steps` tiles deep, to tiles 0 to 3.
template <class Sums>
void AddTileRow(const uint8_t* rows, int64_t row_pitch, const uint8_t* strip, int64_t steps) {
  constexpr int64_t kLine = kVectors * kBytes;
  TileFence();
  for (int64_t s = 0; s < steps; ++s, rows += kBytes, strip += kTile * kLine) {
    _tile_loadd(4, rows, row_pitch);
    _tile_loadd(6, strip, kLine);
    JAXFP8_DOT(0, 4, 6);
    _tile_loadd(7, strip + kBytes, kLine);
    JAXFP8_DOT(1, 4, 7);
    _tile_loadd(6, strip + 2 * kBytes, kLine);
    JAXFP8_DOT(2, 4, 6);
    _tile_loadd(7, strip + 3 * kBytes, kLine);
    JAXFP8_DOT(3, 4, 7);
  }
  TileFence();
}

// Two tiles of rows, of `height` each, times half a strip: four sums of two times two tiles.
template <class Sums>
void MultiplyTileSquare(const uint8_t* rows, int64_t row_pitch, int height, const uint8_t* strip,
                        int64_t steps, Found<Sums>* found, int64_t pitch, bool first) {
  constexpr int64_t kLine = kVectors * kBytes;
  const int64_t bytes = pitch * sizeof *found;
  const uint8_t* lower = rows + height * row_pitch;
  Found<Sums>* found_lower = found + height * pitch;
  LoadSums(found, found_lower, bytes, first);
  TileFence();
  for (int64_t s = 0; s < steps; ++s, rows += kBytes, lower += kBytes, strip += kTile * kLine) {
    _tile_loadd(6, strip, kLine);
    _tile_loadd(7, strip + kBytes, kLine);
    _tile_loadd(4, rows, row_pitch);
    _tile_loadd(5, lower, row_pitch);
    JAXFP8_DOT(0, 4, 6);
    JAXFP8_DOT(1, 4, 7);
    JAXFP8_DOT(2, 5, 6);
    JAXFP8_DOT(3, 5, 7);
  }
  StoreSums(found, found_lower, bytes);
}

// Adds two tiles of columns along the depth, a cache line of codes deep, times so many turned rows
// to tiles 0 and 1, and with `kBoth` times as many others to 2 and 3.
template <class Sums, bool kBoth>
void AddTurnedTiles(const uint8_t* columns, int64_t pitch, const uint8_t* turned,
                    const uint8_t* other, int rows) {
  const int64_t row_bytes = rows * sizeof(int32_t);
  TileFence();
#pragma GCC unroll 2
  for (int t = 0; t < kQuad / Sums::kGroup; ++t) {
    _tile_loadd(6, turned + t * kTile * row_bytes, row_bytes);
    _tile_loadd(4, columns + t * kBytes, pitch);
    JAXFP8_DOT(0, 4, 6);
    _tile_loadd(5, columns + kTile * pitch + t * kBytes, pitch);
    JAXFP8_DOT(1, 5, 6);
    if constexpr (kBoth) {
      _tile_loadd(7, other + t * kTile * row_bytes, row_bytes);
      JAXFP8_DOT(2, 4, 7);
      JAXFP8_DOT(3, 5, 7);
    }
  }
  TileFence();
}

#undef JAXFP8_DOT

// How many tiles deep so many values are, once padded.
template <class Sums>
constexpr int64_t Steps(int64_t depth) {
  return (depth + kTile * Sums::kGroup - 1) / (kTile * Sums::kGroup);
}

// A tile of rows times a strip.
template <class Sums>
void MultiplyTileRow(const uint8_t* rows, int64_t row_pitch, const uint8_t* strip, int64_t steps,
                     Found<Sums>* found, int64_t pitch, bool first) {
  const int64_t bytes = pitch * sizeof *found;
  LoadSums(found, found + 2 * kTile, bytes, first);
  AddTileRow<Sums>(rows, row_pitch, strip, steps);
  StoreSums(found, found + 2 * kTile, bytes);
}

// Adds the worth of what tiles have found in float32.
template <class Sums>
void AddNarrowTiles(const Found<Sums>* found, int64_t pitch, int rows, const NarrowSums& to) {
  for (int r = 0; r < rows; ++r) {
    FoundVector<Sums> row[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      row[v] = Load<FoundVector<Sums>>(found + r * pitch + v * kLanes);
    }
    AddNarrow(row, to, r);
  }
}

// Rows are one tile, or two where they are more than fit one.
template <class Sums>
void MultiplyTiles(const RowsOfTile& rows, const uint8_t* strip, int64_t depth, void* sums,
                   int64_t pitch, bool first, const NarrowSums* narrow, UpcomingLines&) {
  auto* found = static_cast<Found<Sums>*>(sums);
  const int64_t steps = Steps<Sums>(depth);
  if (rows.count <= kTile) {
    MultiplyTileRow<Sums>(rows.data, rows.pitch, strip, steps, found, pitch, first);
  } else {
    constexpr int kHalf = kColumns / 2;
    const int height = rows.count / 2;
    MultiplyTileSquare<Sums>(rows.data, rows.pitch, height, strip, steps, found, pitch, first);
    MultiplyTileSquare<Sums>(rows.data, rows.pitch, height, strip + kHalf * sizeof *found, steps,
                             found + kHalf, pitch, first);
  }
  if (narrow) AddNarrowTiles<Sums>(found, pitch, rows.count, *narrow);
}

// Clears what a tile has beyond `depth`, for `count` runs of packed groups.
template <class Sums>
void PadGroups(uint8_t* data, int64_t pitch, int64_t count, int64_t depth, int64_t group_bytes) {
  const int64_t groups = (depth + Sums::kGroup - 1) / Sums::kGroup;
  const int64_t missing = (kTile - groups % kTile) % kTile;
  for (int64_t i = 0; i < count; ++i) {
    std::memset(data + i * pitch + groups * group_bytes, 0, missing * group_bytes);
  }
}

template <class Sums>
void PackTileRows(const Side& side, const Block& block, const Panel& panel) {
  PackRows<Sums>(side, block, panel);
  PadGroups<Sums>(panel.data, panel.pitch, block.count, block.depth, sizeof(int32_t));
}

template <class Sums>
void PackTileStrip(const Side& side, const Block& strip, const Panel& panel) {
  PackStripOf<Sums>(side, strip, panel);
  PadGroups<Sums>(panel.data, 0, 1, strip.depth, kVectors * kBytes);
}

template <class Sums>
void PackTileColumns(const Side& side, const Block& block, const Panel& panel) {
  PackColumns<Sums>(side, block, panel);
  PadGroups<Sums>(panel.data, panel.pitch, Strips(block), block.depth, kVectors * kBytes);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_AMX_MICROKERNEL_H_
