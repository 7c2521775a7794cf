// Products of tiles by AMX, of the panels of other kernels: 64 bytes each of 16 packed rows are a
// tile as they lie, and so are 16 groups of a strip, of 16 columns each.

#ifndef JAXFP8_CPU_KERNELS_TILES_H_
#define JAXFP8_CPU_KERNELS_TILES_H_

#include "cpu/kernels/pack.h"
#include "cpu/kernels/table.h"
#include "cpu/kernels/tile.h"
#include "cpu/kernels/tile_config.h"

namespace jaxfp8::JAXFP8_ISA {

inline constexpr int kTile = kTileRows;  // groups of depth and columns, too
static_assert(kBytes == kTileBytes);

inline void EnterTiles() {
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
}

inline void LeaveTiles() { _tile_release(); }

// Tiles 0 and 1 are the sums that are found from `one` on, side by side, 2 and 3 those from
// `other`.
template <typename T>
inline void LoadSums(const T* one, const T* other, int64_t bytes, bool first) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
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

// 16 rows times a strip, `steps` tiles deep.
template <class Sums>
void MultiplyTileRow(const uint8_t* rows, int64_t row_pitch, const uint8_t* strip, int64_t steps,
                     Found<Sums>* found, int64_t pitch, bool first) {
  constexpr int64_t kLine = kVectors * kBytes;
  const int64_t bytes = pitch * sizeof *found;
  LoadSums(found, found + 2 * kTile, bytes, first);
  for (int64_t s = 0; s < steps; ++s, rows += kBytes, strip += kTile * kLine) {
    _tile_loadd(4, rows, row_pitch);
    _tile_loadd(5, strip, kLine);
    JAXFP8_DOT(0, 4, 5);
    _tile_loadd(6, strip + kBytes, kLine);
    JAXFP8_DOT(1, 4, 6);
    _tile_loadd(7, strip + 2 * kBytes, kLine);
    JAXFP8_DOT(2, 4, 7);
    _tile_loadd(5, strip + 3 * kBytes, kLine);
    JAXFP8_DOT(3, 4, 5);
  }
  StoreSums(found, found + 2 * kTile, bytes);
}

// 32 rows times half a strip: four sums of two times two tiles.
template <class Sums>
void MultiplyTileSquare(const uint8_t* rows, int64_t row_pitch, const uint8_t* strip, int64_t steps,
                        Found<Sums>* found, int64_t pitch, bool first) {
  constexpr int64_t kLine = kVectors * kBytes;
  const int64_t bytes = pitch * sizeof *found;
  const uint8_t* lower = rows + kTile * row_pitch;
  Found<Sums>* found_lower = found + kTile * pitch;
  LoadSums(found, found_lower, bytes, first);
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

#undef JAXFP8_DOT

// Whole tiles: panels have room for them, and what is found of rows beyond `count` is not used.
template <class Sums>
void MultiplyTiles(const uint8_t* rows, int64_t row_pitch, int count, const uint8_t* strip,
                   int64_t depth, void* sums, int64_t pitch, bool first) {
  auto* found = static_cast<Found<Sums>*>(sums);
  const int64_t steps = (depth + kTile * Sums::kGroup - 1) / (kTile * Sums::kGroup);
  if (count <= kTile) {
    return MultiplyTileRow<Sums>(rows, row_pitch, strip, steps, found, pitch, first);
  }
  constexpr int kHalf = kColumns / 2;
  MultiplyTileSquare<Sums>(rows, row_pitch, strip, steps, found, pitch, first);
  MultiplyTileSquare<Sums>(rows, row_pitch, strip + kHalf * sizeof *found, steps, found + kHalf,
                           pitch, first);
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
void PackTileColumns(const Side& side, const Block& block, const Panel& panel) {
  PackColumns<Sums>(side, block, panel);
  PadGroups<Sums>(panel.data, panel.pitch, Strips(block), block.depth, kVectors * kBytes);
}

// A kernel for panels of `Policy`.
template <class Policy>
constexpr Kernel TileEntry(const char* name, unsigned needs, Sums sums) {
  Kernel kernel = Entry<Policy>(name, needs, sums);
  kernel.rows = 2 * kTile;
  kernel.row_step = kTile;
  kernel.group = kTile * Policy::kGroup;
  kernel.slice = 2 * kSlice<Policy::kGroup>;
  // Few roundings: a tile's products are summed before they are added.
  kernel.depth = 4096;
  // Products are so fast that packing rows again tells.
  kernel.room = {.rows = 4 << 20, .sums = 2 << 20};
  // Few rows are left to kernels that need no tiles.
  kernel.few = 0;
  kernel.multiply_few = nullptr;
  kernel.least_rows = Policy::kExact ? kFewRows + 1 : 3;
  kernel.enter = EnterTiles;
  kernel.leave = LeaveTiles;
  kernel.pack_rows = PackTileRows<Policy>;
  kernel.pack_columns = PackTileColumns<Policy>;
  kernel.multiply = MultiplyTiles<Policy>;
  return kernel;
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_TILES_H_
