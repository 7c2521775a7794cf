// Packing, as far as it is the same for every kernel.
//
// A kernel's `Sums` packs one line along the depth (`PackLine`), and groups of lines across it
// (`Spread`). Columns of bytes that lie along the depth are turned by quads, four depths each,
// which it splits (`SplitQuads`); wider ones are packed like rows, a few at a time, and turned.

#ifndef JAXFP8_CPU_KERNELS_GEMM_PACK_H_
#define JAXFP8_CPU_KERNELS_GEMM_PACK_H_

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/decode/dispatch.h"
#include "cpu/kernels/gemm/load_columns.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/operand/lines.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/simd/transpose.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

enum class Role : uint8_t { kRow, kColumn };

inline int64_t Strips(const Block& block) { return (block.count + kColumns - 1) / kColumns; }

// How many columns strip s of the block has.
inline int64_t ColumnsOf(const Block& block, int64_t s) {
  return std::min<int64_t>(block.count - s * kColumns, kColumns);
}

template <class Sums>
int64_t GroupsOf(const Block& block) {
  return (block.depth + Sums::kGroup - 1) / Sums::kGroup;
}

// Adds groups of a strip, `pitch` bytes from one to the next, to the sums of its columns.
template <class Sums>
void SumGroups(const uint8_t* from, int64_t pitch, int64_t groups, const Panel& panel) {
  S32 total[kVectors] = {};
  for (int64_t g = 0; g < groups; ++g, from += pitch) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      total[v] = Sums::AddLanes(total[v], Sums::Ones(), LoadColumns<Sums>(from + v * kBytes));
    }
  }
  int32_t totals[kColumns];
  std::memcpy(totals, total, sizeof totals);
  for (int i = 0; i < kColumns; ++i) panel.sum[i] += totals[i];
}

// Packs a strip by `Sums::Spread`, which takes whole lines of kColumns values; others are padded.
template <class Sums, DType kType>
void PackStrip(Lines lines, const Block& block, uint8_t* to) {
  constexpr int kGroup = Sums::kGroup;
  constexpr int kSize = SizeOf(kType);
  uint8_t padded[kGroup][kColumns * kSize];
  std::memset(padded, Sums::template kZeroCode<kType>, sizeof padded);
  for (int64_t k = 0; k < block.depth; k += kGroup) {
    const uint8_t* line[kGroup];
    const bool whole = block.count == kColumns && k + kGroup <= block.depth;
#pragma GCC unroll 4
    for (int j = 0; j < kGroup; ++j) {
      line[j] = whole ? lines[k + j] : padded[j];
      if (whole) continue;
      if (k + j < block.depth) {
        std::memcpy(padded[j], lines[k + j], block.count * kSize);
      } else {
        std::memset(padded[j], Sums::template kZeroCode<kType>, sizeof padded[j]);
      }
    }
    typename Sums::Vector column[kVectors];
    Sums::template Spread<kType>(line, column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, to += kBytes) Store(to, column[v]);
  }
}

template <class Sums>
void PackRows(const Side& side, const Block& block, const Panel& panel) {
  Factors(side, block, block.count, panel);
  if constexpr (Sums::kExact) {
    for (int64_t i = 0; i < block.count; ++i) panel.zero[i] += Sums::Shift(side.dtype, Role::kRow);
  }
  Lines lines = AlongDepth(side, block);
  lines.Prepare(block.count, block.depth, panel.raw);
  for (int64_t i = 0; i < block.count; ++i) {
    Sums::PackLine(side, block, i, lines[i], panel.data + i * panel.pitch, panel);
  }
}

// Packs kLanes columns, which lie along the depth, from `first` on. So few at a time that a
// processor looks ahead in each.
template <class Sums>
void TurnLanesOf(const Side& side, const Block& block, int first, const Panel& panel) {
  constexpr int kMostGroups = 256;
  // A line's end is read in whole vectors; the odd lanes keep lines off each other's cache sets.
  constexpr int kPitch = kMostGroups + kLanes;
  int32_t packed[kLanes * kPitch];
  auto* to = reinterpret_cast<int32_t*>(panel.data) + first;
  Block part = block;
  for (int64_t done = 0; done < block.depth; done += part.depth) {
    part.start = block.start + done;
    part.depth = std::min<int64_t>(kMostGroups * Sums::kGroup, block.depth - done);
    const int64_t groups = (part.depth + Sums::kGroup - 1) / Sums::kGroup;
    const Lines lines = AlongDepth(side, part);
    for (int i = 0; i < kLanes; ++i) {
      int32_t* line = packed + i * kPitch;
      if (first + i < block.count) {
        Sums::PackLine(side, part, first + i, lines[first + i], line, panel);
        std::fill_n(line + groups, kLanes, 0);
      } else {
        std::fill_n(line, groups + kLanes, 0);
      }
    }
    for (int64_t g = 0; g < groups; g += kLanes, to += kLanes * kColumns) {
      TurnLanes(packed + g, kPitch, to, kColumns, groups - g);
    }
  }
}

template <class Sums>
void StartColumns(const Side& side, const Block& block, const Panel& panel) {
  const int64_t room = Strips(block) * kColumns;
  Factors(side, block, room, panel);
  if constexpr (Sums::kExact) {
    for (int64_t i = 0; i < room; ++i) panel.zero[i] += Sums::Shift(side.dtype, Role::kColumn);
  }
}

// Strip s of a block, from `start` on for `depth`.
inline Block StripOf(const Block& block, int64_t s, int64_t start, int64_t depth) {
  Block strip = block;
  strip.first += s * kColumns;
  strip.count = ColumnsOf(block, s);
  strip.start += start;
  strip.depth = depth;
  return strip;
}

inline Panel PanelOf(const Panel& panel, int64_t s, int64_t offset) {
  const int64_t first = s * kColumns;
  return {panel.data + s * panel.pitch + offset,
          0,
          panel.scale + first,
          panel.zero + first,
          panel.sum + first,
          panel.raw};
}

// Bytes from quads to the next of the same prepared columns.
inline constexpr int64_t kQuadsPitch = kPreparedColumns * kQuad;
static_assert(kPreparedColumns % kColumns == 0);

// Packs a strip from quads, those of kColumns columns side by side and `pitch` bytes to the next;
// they are split into groups by `Sums::SplitQuads`.
template <class Sums, DType kType, bool kStream>
void PackQuads(const uint8_t* from, int64_t pitch, int64_t quads, uint8_t* to) {
  constexpr int kParts = kQuad / Sums::kGroup;
  for (int64_t q = 0; q < quads; ++q, from += pitch, to += kParts * kVectors * kBytes) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kStream) __builtin_prefetch(from + kStreamAhead + v * kBytes);
      typename Sums::Vector part[kParts];
      Sums::template SplitQuads<kType>(Load<S32>(from + v * kBytes), part);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) Store(to + (p * kVectors + v) * kBytes, part[p]);
    }
  }
}

template <class Sums>
void ApplyFactors(const Side& side, const Block& strip, const Panel& panel) {
  if constexpr (requires { Sums::ApplyFactors; }) Sums::ApplyFactors(side, strip, panel);
}

// By sums that take zero points off, if there are any to take.
template <class Sums, DType kType, class Function>
void WithZero(const Side& side, const Function& function) {
  if constexpr (IsInt8(kType) && !std::is_void_v<typename Sums::LessZero>) {
    if (side.zero_point) return function.template operator()<typename Sums::LessZero>();
  }
  function.template operator()<Sums>();
}

// The sums of the columns of a packed strip, if they are wanted.
template <class Sums>
void AddColumnSums(const Block& strip, const Panel& panel) {
  if constexpr (Sums::kExact) {
    if (strip.sums) SumGroups<Sums>(panel.data, kVectors * kBytes, GroupsOf<Sums>(strip), panel);
  }
}

template <class Sums>
void PackPrepared(const Side& side, const Block& strip, const Panel& panel) {
  const uint8_t* from = PreparedAt(side, strip.batch, strip.first, strip.start);
  WithByteType<Sums>(side.dtype, [&]<DType kType>() {
    PackQuads<Sums, kType, true>(from, kQuadsPitch, strip.depth / kQuad, panel.data);
  });
  ApplyFactors<Sums>(side, strip, panel);
}

// Quads of kLanes columns along the depth, from `first` on, as those of prepared columns lie.
template <class Sums, DType kType>
void TurnQuads(const Lines& lines, const Block& strip, int first, uint8_t* to) {
  constexpr int64_t kDepth = kLanes * kQuad;
  for (int64_t k = 0; k < strip.depth; k += kDepth, to += kLanes * kColumns * kQuad) {
    const int64_t depth = std::min(kDepth, strip.depth - k);
    S32 quads[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const bool known = first + i < strip.count;
      if (known && depth == kDepth) {
        quads[i] = Load<S32>(lines[first + i] + k);
        if (kTurnedAhead > 0) __builtin_prefetch(lines[first + i] + k + kTurnedAhead);
      } else {
        std::memset(&quads[i], Sums::template kZeroCode<kType>, sizeof quads[i]);
        if (known) std::memcpy(&quads[i], lines[first + i] + k, depth);
      }
    }
    auto* turned = reinterpret_cast<int32_t*>(to) + first;
    TurnLanes(quads, turned, kColumns, (depth + kQuad - 1) / kQuad);
  }
}

// Columns of bytes along the depth are turned by quads before they are widened: they are fewer.
template <class Sums, DType kType>
void TurnStrip(const Side& side, const Block& strip, uint8_t* to) {
  const Lines lines = AlongDepth(side, strip);
  for (int first = 0; first < kColumns; first += kLanes) {
    TurnQuads<Sums, kType>(lines, strip, first, to);
  }
}

template <class Sums>
void PackTurned(const Side& side, const Block& strip, const Panel& panel) {
  WithByteType<Sums>(side.dtype, [&]<DType kType>() {
    TurnStrip<Sums, kType>(side, strip, panel.raw);
    const int64_t quads = (strip.depth + kQuad - 1) / kQuad;
    PackQuads<Sums, kType, false>(panel.raw, kColumns * kQuad, quads, panel.data);
  });
  ApplyFactors<Sums>(side, strip, panel);
}

template <class Sums>
void PackStripOf(const Side& side, const Block& strip, const Panel& panel) {
  if (side.prepared) return PackPrepared<Sums>(side, strip, panel);
  if (side.depth.Contiguous() && IsEightBit(side.dtype))
    return PackTurned<Sums>(side, strip, panel);
  if (side.depth.Contiguous()) {
    for (int first = 0; first < kColumns; first += kLanes) {
      TurnLanesOf<Sums>(side, strip, first, panel);
    }
    return;
  }
  Lines lines = AcrossDepth(side, strip);
  lines.Prepare(strip.depth, strip.count, panel.raw);
  WithTypeOf<Sums>(side.dtype,
                   [&]<DType kType>() { PackStrip<Sums, kType>(lines, strip, panel.data); });
  ApplyFactors<Sums>(side, strip, panel);
}

// The sums of columns that need no packing.
template <class Sums>
void SumColumns(const Side& side, const Block& block, const Panel& panel) {
  if constexpr (Sums::kAsPrepared != DType::kNone) {
    for (int64_t s = 0; s < Strips(block); ++s) {
      const uint8_t* from = PreparedAt(side, block.batch, block.first + s * kColumns, block.start);
      SumGroups<InPlace<Sums>>(from, kQuadsPitch, block.depth / kQuad, PanelOf(panel, s, 0));
    }
  }
}

// Packs whole strips of lines together, of columns side by side. The strips lie `pitch` bytes
// apart.
template <class Sums, DType kType>
__attribute__((noinline)) void PackTogether(const LinesTogether& lines, int64_t columns, Ask ask,
                                            uint8_t* to, int64_t pitch) {
  constexpr int kGroup = Sums::kGroup;
  constexpr int64_t kStripBytes = kColumns * SizeOf(kType);
  const int64_t bytes = columns * SizeOf(kType);
  const int64_t ahead = std::min(AheadFor(ask, kLineAhead), bytes);
  for (int64_t at = 0; at < bytes; at += kStripBytes, to += pitch) {
    uint8_t* packed = to;
#pragma GCC unroll 8
    for (int k = 0; k < kLinesTogether; k += kGroup) {
      const uint8_t* line[kGroup];
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) {
        line[j] = lines.line[k + j] + at;
        for (int64_t i = 0; i < kStripBytes && at % 64 == 0; i += 64) {
          lines.Request(k + j, at + i, ahead, bytes, ask);
        }
      }
      typename Sums::Vector column[kVectors];
      Sums::template Spread<kType>(line, column);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v, packed += kBytes) Store(packed, column[v]);
    }
  }
}

// Bytes of a packed strip so deep.
template <class Sums>
constexpr int64_t StripBytes(int64_t depth) {
  return depth * kColumns * (4 / Sums::kGroup);
}

// A few lines at a time from end to end; strips and lines that are left over by themselves.
template <class Sums>
void PackSideBySide(const Side& side, const Block& block, const Panel& panel) {
  const Lines lines = AcrossDepth(side, block);
  const int64_t columns = block.count / kColumns * kColumns;
  const int64_t depth = block.depth / kLinesTogether * kLinesTogether;
  const Ask ask = std::max(block.ask, Ask::kL1);
  WithTypeOf<Sums>(side.dtype, [&]<DType kType>() {
    for (int64_t k = 0; k < depth; k += kLinesTogether) {
      PackTogether<Sums, kType>({lines, block, k}, columns, ask, panel.data + StripBytes<Sums>(k),
                                panel.pitch);
    }
  });
  for (int64_t s = 0; s < Strips(block); ++s) {
    const int64_t done = s * kColumns < columns ? depth : 0;
    if (done > 0) ApplyFactors<Sums>(side, StripOf(block, s, 0, done), PanelOf(panel, s, 0));
    if (done == block.depth) continue;
    PackStripOf<Sums>(side, StripOf(block, s, done, block.depth - done),
                      PanelOf(panel, s, StripBytes<Sums>(done)));
  }
}

template <class Sums>
void PackColumns(const Side& side, const Block& block, const Panel& panel) {
  if (side.free.Contiguous()) {
    PackSideBySide<Sums>(side, block, panel);
  } else {
    const bool along = side.depth.Contiguous() || side.prepared;
    const int64_t step = along ? kDepthTurned : kLinesScattered;
    for (int64_t start = 0; start < block.depth; start += step) {
      const int64_t depth = std::min(step, block.depth - start);
      for (int64_t s = 0; s < Strips(block); ++s) {
        PackStripOf<Sums>(side, StripOf(block, s, start, depth),
                          PanelOf(panel, s, StripBytes<Sums>(start)));
      }
    }
  }
  for (int64_t s = 0; s < Strips(block); ++s) {
    AddColumnSums<Sums>(StripOf(block, s, 0, block.depth), PanelOf(panel, s, 0));
  }
}

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMM_PACK_H_
