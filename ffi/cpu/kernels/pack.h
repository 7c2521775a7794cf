// Packing, as far as it is the same for every kernel.
//
// A kernel's `Sums` packs one line along the depth (`PackLine`), and a block of columns whose
// memory runs across the depth (`PackAcross`). Columns that lie along the depth are packed like
// rows, a few at a time, and turned.

#ifndef JAXFP8_CPU_KERNELS_PACK_H_
#define JAXFP8_CPU_KERNELS_PACK_H_

#include <algorithm>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/lines.h"
#include "cpu/kernels/simd.h"
#include "cpu/kernels/turn.h"

namespace jaxfp8::JAXFP8_ISA {

enum class Role : uint8_t { kRow, kColumn };

// Where the scale and zero point of a value of the block are; `i` counts lines, `k` depths.
inline int64_t TileOf(const Side& side, const Block& block, int64_t i, int64_t k) {
  return side.tile_batch[block.batch] + side.tile_free[block.first + i] +
         side.tile_depth[block.start + k];
}

// The scale and zero point of every line, constant along a block unless the side is `fine`. Lines
// up to `room` beyond the last get harmless ones.
inline void Factors(const Side& side, const Block& block, int64_t room, const Panel& panel) {
  const int64_t known = side.fine ? 0 : block.count;
  for (int64_t i = 0; i < room; ++i) {
    panel.scale[i] = 1.0;
    panel.zero[i] = 0.0;
    panel.sum[i] = 0.0;
  }
  for (int64_t i = 0; side.scale && i < known; ++i) {
    panel.scale[i] = side.scale[TileOf(side, block, i, 0)];
  }
  for (int64_t i = 0; side.zero_point && i < known; ++i) {
    panel.zero[i] = side.zero_point[TileOf(side, block, i, 0)];
  }
}

template <class Sums>
void PackRows(const Side& side, const Block& block, const Panel& panel) {
  Factors(side, block, block.count, panel);
  Lines lines = AlongDepth(side, block);
  lines.Prepare(block.count, block.depth, panel.raw);
  for (int64_t i = 0; i < block.count; ++i) {
    Sums::PackLine(side, block, Role::kRow, i, lines[i], panel.data + i * panel.pitch, panel);
  }
}

// Asks for a column some way after column i: a block of one is too short for the processor to see
// where it leads.
inline void PrefetchColumn(const Lines& lines, const Block& block, int64_t i, int size) {
  constexpr int64_t kAhead = 8;
  if (i + kAhead >= block.count) return;
  const uint8_t* column = lines[i + kAhead];
  for (int64_t offset = 0; offset < block.depth * size; offset += 64) {
    __builtin_prefetch(column + offset);
  }
}

template <class Sums>
void TurnColumns(const Side& side, const Block& block, const Panel& panel) {
  constexpr int kMostGroups = Sums::kDepth / Sums::kGroup;
  // A line's end is read in whole vectors; the odd lanes keep lines off each other's cache sets.
  constexpr int kPitch = kMostGroups + kLanes;
  int32_t packed[kLanes * kPitch];
  const int64_t groups = (block.depth + Sums::kGroup - 1) / Sums::kGroup;
  auto* to = reinterpret_cast<int32_t*>(panel.data);
  const Lines lines = AlongDepth(side, block);
  for (int first = 0; first < kColumns; first += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      int32_t* line = packed + i * kPitch;
      if (first + i < block.count) {
        PrefetchColumn(lines, block, first + i, SizeOf(side.dtype));
        Sums::PackLine(side, block, Role::kColumn, first + i, lines[first + i], line, panel);
        std::fill_n(line + groups, kLanes, 0);
      } else {
        std::fill_n(line, groups + kLanes, 0);
      }
    }
    for (int64_t g = 0; g < groups; g += kLanes) {
      TurnLanes(packed + g, kPitch, to + g * kColumns + first, kColumns, groups - g);
    }
  }
}

template <class Sums>
void PackColumns(const Side& side, const Block& block, const Panel& panel) {
  Factors(side, block, kColumns, panel);
  if (side.depth.Contiguous()) return TurnColumns<Sums>(side, block, panel);
  Lines lines = AcrossDepth(side, block);
  lines.Prepare(block.depth, block.count, panel.raw);
  Sums::PackAcross(side, block, lines, panel);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_PACK_H_
