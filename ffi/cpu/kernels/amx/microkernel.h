// The micro-kernels of AMX, on the same packed operands as the others.
//
//     A packed: 64 bytes of 16 rows are a tile        B packed: 16 groups of 16 columns are a tile
//
//     up to 16 rows:            up to 32 rows:               rows transposed, B as [N, K]:
//             B0 B1 B2 B3               B0 B1 (twice)                 At0 At1
//         A   t0 t1 t2 t3           A0  t0 t1                     B0  t0  t2
//                                   A1  t2 t3                     B1  t1  t3
//
// t0 to t3 are tiles of accumulators; A and B are loaded into tiles 4 to 7.

#pragma once

#include "cpu/kernels/amx/tile_config.h"
#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemm/scaled_sums.h"

namespace jaxfp8::JAXFP8_ISA {

inline constexpr int kTile = kTileRows;  // groups of depth and columns, too
static_assert(kBytes == kTileBytes);

// Tile configurations by the number of rows.
struct TileConfigs {
  constexpr TileConfigs() {
    for (int rows = 1; rows <= kTile; ++rows) {
      of[rows] = TileConfig(rows);
      transposed[rows] = TileConfig::Transposed(rows);
    }
  }
  TileConfig of[kTile + 1], transposed[kTile + 1];
};
inline constexpr TileConfigs kTileConfigs;

inline void EnterTiles(int height) { _tile_loadconfig(&kTileConfigs.of[height]); }

inline void EnterTransposedTiles(int rows) { _tile_loadconfig(&kTileConfigs.transposed[rows]); }

inline void LeaveTiles() { _tile_release(); }

// Needed between stores and tile loads of the same memory, in either order: GCC does not know the
// intrinsics' memory accesses.
inline void TileFence() { asm volatile("" ::: "memory"); }

// Tiles 0 and 1 are the accumulators at `one` and `one + kTile`, 2 and 3 those at `other`.
template <typename T>
inline void LoadAccs(const T* one, const T* other, int64_t bytes, bool first) {
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
inline void StoreAccs(T* one, T* other, int64_t bytes) {
  _tile_stored(0, one, bytes);
  _tile_stored(1, one + kTile, bytes);
  _tile_stored(2, other, bytes);
  _tile_stored(3, other + kTile, bytes);
}

// Tile numbers are part of the instructions, and must be literals.
#define JAXFP8_DOT(sums, rows, columns)  \
  if constexpr (Policy::kExact) {        \
    _tile_dpbssd(sums, rows, columns);   \
  } else {                               \
    _tile_dpbf16ps(sums, rows, columns); \
  }

// Adds a tile of rows times a micro-panel, `steps` tiles deep, to tiles 0 to 3.
template <class Policy>
void AddTileRow(const uint8_t* rows, int64_t row_pitch, const uint8_t* panel, int64_t steps) {
  constexpr int64_t kLine = kVectors * kBytes;
  TileFence();
  for (int64_t s = 0; s < steps; ++s, rows += kBytes, panel += kTile * kLine) {
    _tile_loadd(4, rows, row_pitch);
    _tile_loadd(6, panel, kLine);
    JAXFP8_DOT(0, 4, 6);
    _tile_loadd(7, panel + kBytes, kLine);
    JAXFP8_DOT(1, 4, 7);
    _tile_loadd(6, panel + 2 * kBytes, kLine);
    JAXFP8_DOT(2, 4, 6);
    _tile_loadd(7, panel + 3 * kBytes, kLine);
    JAXFP8_DOT(3, 4, 7);
  }
  TileFence();
}

// Two tiles of rows, of `height` each, times half a micro-panel.
template <class Policy>
void MultiplyTileSquare(const uint8_t* rows, int64_t row_pitch, int height, const uint8_t* panel,
                        int64_t steps, Acc<Policy>* acc, int64_t pitch, bool first) {
  constexpr int64_t kLine = kVectors * kBytes;
  const int64_t bytes = pitch * sizeof *acc;
  const uint8_t* lower = rows + height * row_pitch;
  Acc<Policy>* acc_lower = acc + height * pitch;
  LoadAccs(acc, acc_lower, bytes, first);
  TileFence();
  for (int64_t s = 0; s < steps; ++s, rows += kBytes, lower += kBytes, panel += kTile * kLine) {
    _tile_loadd(6, panel, kLine);
    _tile_loadd(7, panel + kBytes, kLine);
    _tile_loadd(4, rows, row_pitch);
    _tile_loadd(5, lower, row_pitch);
    JAXFP8_DOT(0, 4, 6);
    JAXFP8_DOT(1, 4, 7);
    JAXFP8_DOT(2, 5, 6);
    JAXFP8_DOT(3, 5, 7);
  }
  StoreAccs(acc, acc_lower, bytes);
}

// Adds to tiles 0 and 1: two tiles of K-contiguous columns, a cache line of codes deep, times
// `rows` transposed rows. With `kBoth`, adds as many other rows to tiles 2 and 3.
template <class Policy, bool kBoth>
void AddTransposedTiles(const uint8_t* columns, int64_t pitch, const uint8_t* transposed,
                        const uint8_t* other, int rows) {
  const int64_t row_bytes = rows * sizeof(int32_t);
  TileFence();
#pragma GCC unroll 2
  for (int t = 0; t < kQuad / Policy::kGroup; ++t) {
    _tile_loadd(6, transposed + t * kTile * row_bytes, row_bytes);
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

// The depth in tiles of `depth` values, once padded.
template <class Policy>
constexpr int64_t Steps(int64_t depth) {
  return (depth + kTile * Policy::kGroup - 1) / (kTile * Policy::kGroup);
}

// A tile of rows times a micro-panel.
template <class Policy>
void MultiplyTileRow(const uint8_t* rows, int64_t row_pitch, const uint8_t* panel, int64_t steps,
                     Acc<Policy>* acc, int64_t pitch, bool first) {
  const int64_t bytes = pitch * sizeof *acc;
  LoadAccs(acc, acc + 2 * kTile, bytes, first);
  AddTileRow<Policy>(rows, row_pitch, panel, steps);
  StoreAccs(acc, acc + 2 * kTile, bytes);
}

// The destination of the tiles' accumulators. Accumulators scaled at once stay in L1; those of all
// rows would lie in L2.
template <class Policy>
class TileAccs {
 public:
  TileAccs(void* acc, int64_t pitch, bool first, const F32Sums* f32_sums) : f32_sums_(f32_sums) {
    const bool here = first && f32_sums;
    at = here ? own_ : static_cast<Acc<Policy>*>(acc);
    this->pitch = here ? kNR : pitch;
  }

  // Scales and adds the accumulators of `rows` rows, if there are float32 sums.
  void AddScaledRows(int rows) const {
    for (int r = 0; f32_sums_ && r < rows; ++r) {
      AccVector<Policy> row[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        row[v] = Load<AccVector<Policy>>(at + r * pitch + v * kLanes);
      }
      AddScaled(row, *f32_sums_, r);
    }
  }

  Acc<Policy>* at;
  int64_t pitch;  // from row to row

 private:
  const F32Sums* f32_sums_;
  alignas(kBytes) Acc<Policy> own_[2 * kTile * kNR];
};

// Rows are one tile, or two of the same height.
template <class Policy>
void MultiplyTiles(const PackedRows& rows, const uint8_t* panel, int64_t depth, void* acc_of,
                   int64_t pitch, bool first, const F32Sums* f32_sums) {
  const TileAccs<Policy> acc(acc_of, pitch, first, f32_sums);
  const int64_t steps = Steps<Policy>(depth);
  if (rows.count <= kTile) {
    MultiplyTileRow<Policy>(rows.data, rows.pitch, panel, steps, acc.at, acc.pitch, first);
  } else {
    constexpr int kHalf = kNR / 2;
    const int height = rows.count / 2;
    const uint8_t* right = panel + kHalf * sizeof *acc.at;
    MultiplyTileSquare<Policy>(rows.data, rows.pitch, height, panel, steps, acc.at, acc.pitch,
                               first);
    MultiplyTileSquare<Policy>(rows.data, rows.pitch, height, right, steps, acc.at + kHalf,
                               acc.pitch, first);
  }
  acc.AddScaledRows(rows.count);
}

// Clears a tile beyond `depth`, for `count` rows or micro-panels of packed groups.
template <class Policy>
void PadGroups(uint8_t* data, int64_t pitch, int64_t count, int64_t depth, int64_t group_bytes) {
  const int64_t groups = (depth + Policy::kGroup - 1) / Policy::kGroup;
  const int64_t missing = (kTile - groups % kTile) % kTile;
  for (int64_t i = 0; i < count; ++i) {
    std::memset(data + i * pitch + groups * group_bytes, 0, missing * group_bytes);
  }
}

template <class Policy>
void PackTileRows(const Operand& side, const Block& block, const Panel& panel) {
  PackRows<Policy>(side, block, panel);
  PadGroups<Policy>(panel.data, panel.pitch, block.count, block.depth, sizeof(int32_t));
}

template <class Policy>
void PackTilePanel(const Operand& side, const Block& block, const Panel& panel) {
  PackPanel<Policy>(side, block, panel);
  PadGroups<Policy>(panel.data, 0, 1, block.depth, kVectors * kBytes);
  AddColumnSums<Policy>(block, panel);
}

// Whether prepared columns are usable as tiles in place.
template <class Policy>
bool IsInPlace(const Operand& side, const Block& block) {
  return Policy::kExact && side.prepared && side.dtype != Policy::kShiftedColumns &&
         block.depth % (kTile * Policy::kGroup) == 0;
}

// Packs a micro-panel in pieces. The first tile of rows multiplies each piece while it is in L1.
// `keep`: the pieces are needed again.
template <class Policy>
void PackAndMultiplyPieces(const Operand& side, const Block& block, const Panel& panel, bool keep,
                           const PackedRows& rows, Acc<Policy>* acc, int64_t pitch, bool first) {
  // Columns along K are transposed. Short pieces do not pay for this.
  const int64_t depth = side.Along() ? block.depth : kTile * Policy::kGroup;
  const int64_t bytes = pitch * sizeof *acc;
  LoadAccs(acc, acc + 2 * kTile, bytes, first);
  for (int64_t k = 0; k < block.depth; k += depth) {
    const Block piece = PartOf(block, k, std::min(depth, block.depth - k));
    const Panel packed = DataFrom(panel, keep ? PanelBytes<Policy>(k) : 0);
    PackTilePanel<Policy>(side, piece, packed);
    AddTileRow<Policy>(rows.data + k * (4 / Policy::kGroup), rows.pitch, packed.data,
                       Steps<Policy>(piece.depth));
  }
  StoreAccs(acc, acc + 2 * kTile, bytes);
}

template <class Policy>
const uint8_t* PackAndMultiplyTiles(const Operand& side, const Block& block, const Panel& panel,
                                    bool keep, const PackedRows& rows, void* acc_of, int64_t pitch,
                                    bool first, const F32Sums* f32_sums) {
  if (IsInPlace<Policy>(side, block)) {
    Panel in_place = panel;
    in_place.data = const_cast<uint8_t*>(PreparedAt(side, block.batch, block.first, block.start));
    AddColumnSums<Policy>(block, in_place);
    MultiplyTiles<Policy>(rows, in_place.data, block.depth, acc_of, pitch, first, f32_sums);
    return in_place.data;
  }
  const TileAccs<Policy> acc(acc_of, pitch, first, f32_sums);
  const int height = rows.count > kTile ? rows.count / 2 : rows.count;
  PackAndMultiplyPieces<Policy>(side, block, panel, keep || height < rows.count,
                                {rows.data, rows.pitch, height}, acc.at, acc.pitch, first);
  if (height < rows.count) {
    MultiplyTileRow<Policy>(rows.data + height * rows.pitch, rows.pitch, panel.data,
                            Steps<Policy>(block.depth), acc.at + height * acc.pitch, acc.pitch,
                            first);
  }
  acc.AddScaledRows(rows.count);
  return panel.data;
}

}  // namespace jaxfp8::JAXFP8_ISA
