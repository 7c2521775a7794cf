// Few rows times columns along the depth, by turned tiles: columns, widened where they have to be,
// are rows of tiles as they lie, and rows, which are turned once, their columns. Nothing of the
// weight is turned.

#ifndef JAXFP8_CPU_KERNELS_TURNED_TILES_H_
#define JAXFP8_CPU_KERNELS_TURNED_TILES_H_

#include <algorithm>

#include "cpu/kernels/factors.h"
#include "cpu/kernels/lines.h"
#include "cpu/kernels/tile.h"
#include "cpu/kernels/tiles.h"
#include "cpu/kernels/turn.h"

namespace jaxfp8::JAXFP8_ISA {

// The depth of columns that are packed in one go, a cache line of each.
inline constexpr int64_t kDepthTogether = 64;

// Packed values of so much of a line: one tile deep, or two.
template <class Sums>
inline constexpr int kTilesTogether = kQuad / Sums::kGroup;

// Where the panel of at most a tile of rows has them turned: there is room for two tiles.
inline uint8_t* TurnedRows(const Panel& panel) { return panel.data + kTile * panel.pitch; }

// Lane g of row i of `from` becomes lane i of row g of a tile, the second one with `kSecond`.
// Values of two bytes are in the order of lanes: the lower halves of all four, then the upper ones.
template <class Sums, bool kSecond>
void TurnTogether(const uint8_t* from, int64_t pitch, int rows, int32_t* to) {
  constexpr S32 kLowerHalves = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  S32 lines[kLanes];
  for (int i = 0; i < kTile; ++i, from += pitch) {
    lines[i] = Load<S32>(from);
    if constexpr (kTilesTogether<Sums> == 2) {
      const auto second = Load<S32>(from + kBytes);
      lines[i] = __builtin_shuffle(lines[i], second, kLowerHalves + (kSecond ? 4 : 0));
    }
  }
  TurnLanes(lines, to, rows, kTile);
}

// Packs at most a tile of rows, and turns them.
template <class Sums>
void PackTurnedRows(const Side& side, const Block& block, const Panel& panel) {
  constexpr int64_t kSize = 4 / Sums::kGroup;
  PackRows<Sums>(side, block, panel);
  const int rows = static_cast<int>(block.count);
  const int64_t depth = (block.depth + kDepthTogether - 1) / kDepthTogether * kDepthTogether;
  for (int i = 0; i < rows; ++i) {
    uint8_t* line = panel.data + i * panel.pitch;
    std::memset(line + block.depth * kSize, 0, (depth - block.depth) * kSize);
  }
  auto* to = reinterpret_cast<int32_t*>(TurnedRows(panel));
  const int64_t tile = kTile * rows;
  for (int64_t k = 0; k < depth; k += kDepthTogether, to += kTilesTogether<Sums> * tile) {
    const uint8_t* from = panel.data + k * kSize;
    TurnTogether<Sums, false>(from, panel.pitch, rows, to);
    if constexpr (kTilesTogether<Sums> == 2) {
      TurnTogether<Sums, true>(from, panel.pitch, rows, to + tile);
    }
  }
}

// The products of a run of chunks of columns with at most a tile of rows.
template <class Sums, DType kType>
class TurnedTiles {
 public:
  TurnedTiles(const Side& side, const ChunkRun& run, int rows, const Panel& right)
      : side_(side), run_(run), rows_(rows), right_(right), narrow_(!Sums::kExact && run.narrow) {}

  void AddTo(double* sums, int64_t pitch) {
    EnterTurnedTiles(rows_);
    for (int64_t c = 0; !narrow_ && c < run_.count; ++c) {
      StartColumns<Sums>(side_, run_.blocks[c], PanelOf(right_, c, 0));
    }
    int64_t i = 0;
    for (; i < run_.blocks[0].count; i += kColumnsTogether) {
      if constexpr (!Sums::kExact) {
        if (narrow_) {
          AddNarrow(i, sums + i, pitch);
          continue;
        }
      }
      AddColumns(i, sums + i, pitch);
    }
    // There are sums for whole strips.
    const int64_t width = Strips(run_.blocks[0]) * kColumns;
    for (int r = 0; run_.first && r < rows_; ++r) {
      std::fill(sums + r * pitch + i, sums + r * pitch + width, 0.0);
    }
    LeaveTiles();
  }

 private:
  // Two tiles of them: rows are read half as often, and a processor follows so many lines.
  static constexpr int kColumnsTogether = 2 * kTile;
  static constexpr int64_t kPitch = kTilesTogether<Sums> * kBytes;
  // What is found of each column, a lane for each row.
  using Turned = FoundVector<Sums>[kColumnsTogether];

  struct Packed {
    alignas(kBytes) uint8_t columns[kColumnsTogether * kPitch];
  };

  void AddColumns(int64_t first, double* sums, int64_t pitch) {
    for (int64_t c = 0; c < run_.count; ++c) {
      const Block& block = run_.blocks[c];
      const Panel right = FactorsOf(c, first);
      Turned found = {};
      if constexpr (Sums::kExact) {
        block.sums ? Find<true>(c, first, found, right.sum) : Find<false>(c, first, found);
      } else {
        Find<false>(c, first, found);
      }
      Found<Sums> of_row[kTile][kColumnsTogether];
      TurnBack(found, of_row);
      for (int r = 0; r < rows_; ++r) {
        AddRow<Sums>(of_row[r], run_.left[c], r, right, block.depth, kColumnsTogether,
                     sums + r * pitch, run_.first && c == 0);
      }
    }
  }

  // The same, added in float32 while it is turned.
  void AddNarrow(int64_t first, double* sums, int64_t pitch) {
    Turned worth = {};
    for (int64_t c = 0; c < run_.count; ++c) {
      Block block = run_.blocks[c];
      block.first += first;
      block.count = std::min<int64_t>(block.count - first, kColumnsTogether);
      float scale[kColumnsTogether];
      Scales(side_, block, kColumnsTogether, scale);
      F32 of_rows = {};
      for (int r = 0; r < rows_; ++r) of_rows[r] = static_cast<float>(run_.left[c].scale[r]);
      Turned found = {};
      Find<false>(c, first, found);
      for (int i = 0; i < kColumnsTogether; ++i) {
        worth[i] = MultiplyAdd(found[i], of_rows * scale[i], worth[i]);
      }
    }
    Found<Sums> of_row[kTile][kColumnsTogether];
    TurnBack(worth, of_row);
    for (int r = 0; r < rows_; ++r) {
      double* to = sums + r * pitch;
      for (int i = 0; i < kColumnsTogether; ++i) to[i] = of_row[r][i] + (run_.first ? 0 : to[i]);
    }
  }

  Panel FactorsOf(int64_t c, int64_t first) const {
    Panel panel = PanelOf(right_, c, 0);
    panel.scale += first;
    panel.zero += first;
    panel.sum += first;
    return panel;
  }

  void TurnBack(const Turned& from, Found<Sums> (&to)[kTile][kColumnsTogether]) const {
    for (int i = 0; i < kColumnsTogether; i += kTile) {
      S32 lines[kLanes];
      std::memcpy(lines, from + i, sizeof lines);
      TurnLanes(lines, reinterpret_cast<int32_t*>(to[0] + i), kColumnsTogether, rows_);
    }
  }

  // Each piece is multiplied while the next one is packed. With `kSums`, which are exact, also by
  // ones: that gives the sums of columns.
  template <bool kSums>
  void Find(int64_t c, int64_t first, Turned& found, double* sums = nullptr) {
    const Block& block = run_.blocks[c];
    const Lines lines = AlongDepth(side_, block);
    const int64_t count = std::min<int64_t>(block.count - first, kColumnsTogether);
    const uint8_t* line[kColumnsTogether];
    for (int64_t i = 0; i < count; ++i) line[i] = lines[first + i];
    const uint8_t* turned = TurnedRows(run_.left[c]);
    const int64_t step = kTilesTogether<Sums> * kTile * rows_ * sizeof(int32_t);
    Packed packed[2];
    // Lanes that are not used are at least known.
    if (count < kColumnsTogether) std::memset(packed, 0, sizeof packed);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (kSums) {
      alignas(kBytes) uint8_t ones[kBytes];
      std::memset(ones, 1, sizeof ones);
      TileFence();
      _tile_loadd(7, ones, 0);
    }
    Pack(line, count, 0, block.depth, packed[0]);
    int at = 0;
    for (int64_t k = kDepthTogether; k < block.depth; k += kDepthTogether, at ^= 1) {
      AddTurnedTiles<Sums, kSums>(packed[at].columns, kPitch, turned, rows_);
      turned += step;
      Pack(line, count, k, block.depth, packed[at ^ 1]);
    }
    AddTurnedTiles<Sums, kSums>(packed[at].columns, kPitch, turned, rows_);
    _tile_stored(0, found, kBytes);
    _tile_stored(1, found + kTile, kBytes);
    if constexpr (kSums || kTilesTogether<Sums> == 2) {
      Turned more = {};
      _tile_stored(2, more, kBytes);
      _tile_stored(3, more + kTile, kBytes);
      for (int i = 0; i < kColumnsTogether; ++i) {
        if constexpr (kSums)
          sums[i] = more[i][0];
        else
          found[i] += more[i];
      }
    }
  }

  // From depth k on; what lies beyond it decodes to 0.
  static void Pack(const uint8_t* const (&line)[kColumnsTogether], int64_t count, int64_t k,
                   int64_t depth, Packed& packed) {
    const __mmask64 present = ~0ull >> (kDepthTogether - std::min(depth - k, kDepthTogether));
    const __m512i beyond = _mm512_maskz_mov_epi8(
        ~present, _mm512_set1_epi8(static_cast<char>(Sums::template kZeroCode<kType>)));
    uint8_t* to = packed.columns;
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i, to += kPitch) {
      typename Sums::Vector part[kTilesTogether<Sums>];
      __m512i codes = _mm512_maskz_loadu_epi8(present, line[i] + k);
      if constexpr (Sums::template kZeroCode<kType> != 0) codes = _mm512_or_si512(codes, beyond);
      Sums::template UnpackByLanes<kType>(codes, part);
#pragma GCC unroll 2
      for (int t = 0; t < kTilesTogether<Sums>; ++t) Store(to + t * kBytes, part[t]);
    }
  }

  const Side& side_;
  const ChunkRun& run_;
  const int rows_;
  const Panel& right_;
  const bool narrow_;
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_TURNED_TILES_H_
