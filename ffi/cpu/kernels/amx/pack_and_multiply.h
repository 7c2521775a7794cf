// The tiles of the first rows, which pack columns side by side for those that follow.
//
// What is packed a tile deep is multiplied while the next is packed, out of L1: a processor sees
// far enough ahead to do both at once.

#ifndef JAXFP8_CPU_KERNELS_AMX_PACK_AND_MULTIPLY_H_
#define JAXFP8_CPU_KERNELS_AMX_PACK_AND_MULTIPLY_H_

#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/gemm/pack_and_multiply.h"

namespace jaxfp8::JAXFP8_ISA {

// A tile of rows times a strip, `steps` tiles deep, which is packed meanwhile.
template <class Sums, DType kType>
__attribute__((noinline)) void PackAndMultiplyTileRow(const RowsOfTile& rows,
                                                      ColumnsOfLines<Sums, kType> columns,
                                                      const uint8_t* strip, int64_t steps,
                                                      Found<Sums>* found, int64_t pitch,
                                                      bool first) {
  const int64_t bytes = pitch * sizeof *found;
  const uint8_t* row = rows.data;
  LoadSums(found, found + 2 * kTile, bytes, first);
  for (int64_t s = 0; s < steps; ++s) {
    for (int g = 0; g < kTile; ++g) {
      typename Sums::Vector column[kVectors];
      columns.Next(column);
    }
    if (s == 0) continue;
    AddTileRow<Sums>(row, rows.pitch, strip, 1);
    row += kBytes;
    strip += StripBytes<Sums>(kTile * Sums::kGroup);
  }
  AddTileRow<Sums>(row, rows.pitch, strip, 1);
  StoreSums(found, found + 2 * kTile, bytes);
}

// Of two tiles of rows, the second one finds what the first one has packed.
template <class Sums>
void PackAndMultiplyTiles(const Side& side, const Block& strip, const Panel& panel, int64_t,
                          const RowsOfTile& rows, void* sums, int64_t pitch, bool first,
                          const NarrowSums* narrow, UpcomingLines&) {
  static_assert(std::is_void_v<typename Sums::LessZero>, "zero points are taken off afterwards");
  constexpr int64_t kDepth = kTile * Sums::kGroup;
  auto* found = static_cast<Found<Sums>*>(sums);
  const int height = rows.count > kTile ? rows.count / 2 : rows.count;
  const int64_t steps = AsItLies<Sums>(side, strip) / kDepth, depth = steps * kDepth;
  if (steps > 0) {
    const Lines lines = AcrossDepth(side, strip);
    WithByteType<Sums>(side.dtype, [&]<DType kType>() {
      const ColumnsOfLines<Sums, kType> columns(lines, kNextStrip, panel.zero, panel.data);
      PackAndMultiplyTileRow<Sums, kType>({rows.data, rows.pitch, height}, columns, panel.data,
                                          steps, found, pitch, first);
    });
  }
  if (depth < strip.depth) {
    const Block rest = StripOf(strip, 0, depth, strip.depth - depth);
    const Panel after = PanelOf(panel, 0, StripBytes<Sums>(depth));
    PackTileStrip<Sums>(side, rest, after);
    const uint8_t* from = rows.data + depth * (4 / Sums::kGroup);
    MultiplyTileRow<Sums>(from, rows.pitch, after.data, Steps<Sums>(rest.depth), found, pitch,
                          first && steps == 0);
  }
  if (height < rows.count) {
    MultiplyTileRow<Sums>(rows.data + height * rows.pitch, rows.pitch, panel.data,
                          Steps<Sums>(strip.depth), found + height * pitch, pitch, first);
  }
  if (narrow) AddNarrowTiles<Sums>(found, pitch, rows.count, *narrow);
  AddColumnSums<Sums>(strip, panel);
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_AMX_PACK_AND_MULTIPLY_H_
