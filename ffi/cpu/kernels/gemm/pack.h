// Packing: rows of A into panels, and columns of B into micro-panels of kNR columns.
//
//     A [M][K]  --PackRow-->      packed row: K values, `group` to a 32-bit lane
//
//     B [K][N]  --LineColumns-->  packed micro-panel:  b0 b1 ... b(NR-1)   group 0 of K
//     B [N][K]  --transpose, QuadColumns-->            b0 b1 ... b(NR-1)   group 1
//     prepared  --QuadColumns-->                       ...

#pragma once

#include <algorithm>

#include "cpu/kernels/decode/dispatch.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/operand/lines.h"
#include "cpu/kernels/operand/scales.h"
#include "cpu/kernels/policy/lane_policy.h"
#include "cpu/kernels/simd/transpose.h"
#include "cpu/kernels/simd/vector.h"

namespace jaxfp8::JAXFP8_ISA {

// Sources of columns for the micro-kernel: B in place, decoded in registers.
//
//     LineColumns    B as [K, N]: kNR values of each of `group` lines, interleaved
//     QuadColumns    prepared B, or [N, K] transposed by quads: 4 K values of a column side by side
//
//     memory --load--> 8-bit codes --decode--> b[kVectors] --> micro-kernel
//                                                    \-store-> packed micro-panel, for other rows

// The zero points of kNR columns, if they are subtracted.
template <class Policy, bool kSubtract>
class ColumnZeros {
 public:
  explicit ColumnZeros(const double* zero) {
    for (int v = 0; kSubtract && v < kVectors; ++v) zero_[v] = Zeros(zero + v * kLanes);
  }

  // The columns of vector v less their zero points.
  [[gnu::always_inline]] typename Policy::Vector Less(int v, typename Policy::Vector column) const {
    if constexpr (kSubtract) column -= zero_[v];
    return column;
  }

 private:
  F32 zero_[kSubtract ? kVectors : 1];
};

// The last byte of the next micro-panel, or cache line. Lines need not start at a cache line: its
// first byte may be in a line already read.
inline constexpr int kNextPanel = std::max(kNR, 64) + 63;

// The fewest rows of the first tile of a GEMM. Tiles have even heights. Fewer rows times [K, N] are
// a GEMV; so are few rows times [N, K], but for short chunks.
inline constexpr int kMinGemmRows = (kMR + 1) / 2;

// Lines across K, at equal distances. Packs the columns to `to` unless it is null, and prefetches
// the next micro-panel into L2.
template <class Policy, DType kType, bool kSubtract>
class LineColumns {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kGroups = 1;
  static constexpr int kMinRows = kMinGemmRows, kMaxRows = kMR;

  LineColumns(const Lines& lines, const double* zero, uint8_t* to)
      : zero_(zero), step_(lines[Policy::kGroup] - lines[0]), to_(to) {
    for (int j = 0; j < Policy::kGroup; ++j) line_[j] = lines[j];
  }

  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(int, Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int j = 0; j < Policy::kGroup; ++j) {
      for (int i = 0; i < kNR * (SizeOf(kType) - 1) + 1; i += 64) {
        __builtin_prefetch(line_[j] + kNextPanel * SizeOf(kType) - i, 0, 2);
      }
    }
    Policy::template LoadLines<kType>(line_, column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = zero_.Less(v, column[v]);
#pragma GCC unroll 4
    for (int j = 0; j < Policy::kGroup; ++j) line_[j] += step_;
    if (!to_) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, to_ += kBytes) Store(to_, column[v]);
  }

 private:
  ColumnZeros<Policy, kSubtract> zero_;
  const uint8_t* line_[Policy::kGroup];
  int64_t step_;
  uint8_t* to_;
};

// Quads of kNR columns, interleaved, `pitch` bytes from quad to quad. With `kPack` each is packed
// to `to` and read again from there, for lack of registers.
template <class Policy, DType kType, bool kSubtract, bool kPack>
class QuadColumns {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kGroups = kQuad / Policy::kGroup;
  // Of exact sums few rows need the packed columns, too: to add them up.
  static constexpr int kMinRows = kPack && !Policy::kExact ? kMinGemmRows : 1;
  static constexpr int kMaxRows = kPack ? kMR : std::min(kMR, kGemvRows);

  QuadColumns(const uint8_t* from, int64_t pitch, const double* zero, uint8_t* to)
      : zero_(zero), from_(from), pitch_(pitch), to_(to) {}

  [[gnu::always_inline]] void Start() {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(from_ + kStreamAhead + v * kBytes);
      Vector part[kGroups];
      Policy::template LoadQuads<kType>(Load<S32>(from_ + v * kBytes), part);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Vector column = zero_.Less(v, part[g]);
        if constexpr (kPack) {
          Store(to_ + (g * kVectors + v) * kBytes, column);
        } else {
          column_[g][v] = column;
        }
      }
    }
    from_ += pitch_;
    if constexpr (kPack) to_ += kGroups * kVectors * kBytes;
  }

  [[gnu::always_inline]] void Next(int g, Vector (&column)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kPack) {
        column[v] = Load<Vector>(to_ + ((g - kGroups) * kVectors + v) * kBytes);
      } else {
        column[v] = column_[g][v];
      }
    }
  }

 private:
  ColumnZeros<Policy, kSubtract> zero_;
  const uint8_t* from_;
  int64_t pitch_;
  uint8_t* to_;
  Vector column_[kPack ? 1 : kGroups][kVectors];
};

// Bytes from quad to quad of the same prepared columns.
inline constexpr int64_t kQuadsPitch = kPreparedColumns * kQuad;
static_assert(kPreparedColumns % kNR == 0);

template <class Policy>
int64_t GroupsOf(const Block& block) {
  return (block.depth + Policy::kGroup - 1) / Policy::kGroup;
}

// Bytes of a packed micro-panel of `depth` K values.
template <class Policy>
constexpr int64_t PanelBytes(int64_t depth) {
  return depth * kNR * (4 / Policy::kGroup);
}

// `depth` K values of the block, from `start` on.
inline Block PartOf(Block block, int64_t start, int64_t depth) {
  block.ahead += block.depth - start - depth;
  block.start += start;
  block.depth = depth;
  return block;
}

template <class Policy>
void PackRows(const Operand& side, const Block& block, const Panel& panel) {
  LoadFactors(side, block, block.count, panel);
  for (int64_t i = 0; i < block.count; ++i) {
    panel.zero[i] += ShiftOf(side.dtype, Policy::kShiftedRows);
  }
  Lines lines = AlongDepth(side, block);
  lines.Prepare(block.count, block.depth, panel.raw);
  for (int64_t i = 0; i < block.count; ++i) {
    Policy::PackRow(side, block, i, lines[i], panel.data + i * panel.pitch, panel);
  }
}

template <class Policy>
void LoadColumnFactors(const Operand& side, const Block& block, const Panel& panel) {
  const int64_t room = (block.count + kNR - 1) / kNR * kNR;
  LoadFactors(side, block, room, panel);
  const int shift = ShiftOf(side.dtype, Policy::kShiftedColumns);
  for (int64_t i = 0; shift && i < room; ++i) panel.zero[i] += shift;
}

// 16- and 32-bit columns along K: packed like rows, kLanes at a time, and transposed.
template <class Policy>
void TransposePackedRows(const Operand& side, const Block& block, int first, const Panel& panel) {
  constexpr int kGroups = 256;
  // The end of a row is read in whole vectors; odd lanes keep rows off each other's cache sets.
  constexpr int kPitch = kGroups + kLanes;
  int32_t packed[kLanes * kPitch];
  auto* to = reinterpret_cast<int32_t*>(panel.data) + first;
  Block part = block;
  for (int64_t done = 0; done < block.depth; done += part.depth) {
    part = PartOf(block, done, std::min<int64_t>(kGroups * Policy::kGroup, block.depth - done));
    const int64_t groups = GroupsOf<Policy>(part);
    const Lines lines = AlongDepth(side, part);
    for (int i = 0; i < kLanes; ++i) {
      int32_t* line = packed + i * kPitch;
      const bool known = first + i < block.count;
      if (known) Policy::PackRow(side, part, first + i, lines[first + i], line, panel);
      std::fill(line + (known ? groups : 0), line + groups + kLanes, 0);
    }
    for (int64_t g = 0; g < groups; g += kLanes, to += kLanes * kNR) {
      TransposeLanes(packed + g, kPitch, to, kNR, groups - g);
    }
  }
}

// [N, K] bytes become quads of kNR columns, interleaved. Bytes are transposed before they are
// widened: there are fewer of them. Prefetching the next lines is 1.4x faster, but not with AMX.
template <class Policy, DType kType>
void TransposeQuads(const Operand& side, const Block& block, uint8_t* to) {
  constexpr int64_t kDepth = kLanes * kQuad;
  const Lines lines = AlongDepth(side, block);
  for (int first = 0; first < kNR; first += kLanes) {
    auto* out = reinterpret_cast<int32_t*>(to) + first;
    for (int64_t k = 0; k < block.depth; k += kDepth, out += kLanes * kNR) {
      const int64_t depth = std::min(kDepth, block.depth - k);
      S32 quads[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const bool known = first + i < block.count;
        if (known && depth == kDepth) {
          quads[i] = Load<S32>(lines[first + i] + k);
          if (kTransposeAhead > 0) __builtin_prefetch(lines[first + i] + k + kTransposeAhead);
        } else {
          std::memset(&quads[i], Policy::template kZeroCode<kType>, sizeof quads[i]);
          if (known) std::memcpy(&quads[i], lines[first + i] + k, depth);
        }
      }
      TransposeLanes(quads, out, kNR, (depth + kQuad - 1) / kQuad);
    }
  }
}

// The part of a block of columns readable in place by a source: whole groups, and only lines
// readable kNR wide (there may be other lines beyond the block).
template <class Policy>
int64_t DirectDepth(const Operand& side, const Block& block) {
  if (side.prepared || side.depth.Contiguous()) return block.depth / kQuad * kQuad;
  if (!side.free.Contiguous() || side.depth.table) return 0;
  const int64_t lines = block.depth + block.ahead;
  const int64_t readable = AcrossDepth(side, block).Readable(lines, block.count, kNR);
  return std::min(readable, block.depth) / Policy::kGroup * Policy::kGroup;
}

// Calls `function` with the source of a block of columns. The source packs them if `pack`.
template <class Policy, DType kType, bool kSubtract, class Function>
void WithColumns(const Operand& side, const Block& block, const Panel& panel, bool pack,
                 const Function& function) {
  if constexpr (IsEightBit(kType)) {
    if (side.prepared || side.depth.Contiguous()) {
      if (!side.prepared) TransposeQuads<Policy, kType>(side, block, panel.raw);
      const uint8_t* from =
          side.prepared ? PreparedAt(side, block.batch, block.first, block.start) : panel.raw;
      const int64_t pitch = side.prepared ? kQuadsPitch : kNR * kQuad;
      if (!pack) {
        using Columns = QuadColumns<Policy, kType, kSubtract, false>;
        return function(Columns(from, pitch, panel.zero, nullptr));
      }
      using Columns = QuadColumns<Policy, kType, kSubtract, true>;
      return function(Columns(from, pitch, panel.zero, panel.data));
    }
  }
  using Columns = LineColumns<Policy, kType, kSubtract>;
  function(Columns(AcrossDepth(side, block), panel.zero, pack ? panel.data : nullptr));
}

// Packs columns of any layout, line by line, padded with codes of 0.
template <class Policy, DType kType>
void PackPadded(const Lines& lines, const Block& block, uint8_t* to) {
  constexpr int kSize = SizeOf(kType);
  uint8_t padded[Policy::kGroup][kNR * kSize];
  const uint8_t* line[Policy::kGroup];
  for (int64_t k = 0; k < block.depth; k += Policy::kGroup) {
    for (int j = 0; j < Policy::kGroup; ++j) {
      line[j] = padded[j];
      std::memset(padded[j], Policy::template kZeroCode<kType>, sizeof padded[j]);
      if (k + j < block.depth) std::memcpy(padded[j], lines[k + j], block.count * kSize);
    }
    typename Policy::Vector column[kVectors];
    Policy::template LoadLines<kType>(line, column);
    for (int v = 0; v < kVectors; ++v, to += kBytes) Store(to, column[v]);
  }
}

// Packs a block of at most kNR columns.
template <class Policy>
void PackPanel(const Operand& side, const Block& block, const Panel& panel) {
  if (side.depth.Contiguous() && !side.prepared && !IsEightBit(side.dtype)) {
    for (int first = 0; first < kNR; first += kLanes) {
      TransposePackedRows<Policy>(side, block, first, panel);
    }
    return;
  }
  const int64_t direct = DirectDepth<Policy>(side, block);
  WithPackedType<Policy>(side.dtype, [&]<DType kType>() {
    if (direct > 0) {
      const Block part = PartOf(block, 0, direct);
      WithColumns<Policy, kType, false>(side, part, panel, true, [&](auto columns) {
        constexpr int kGroups = decltype(columns)::kGroups;
        for (int64_t g = 0; g < GroupsOf<Policy>(part); g += kGroups) {
          columns.Start();
          typename Policy::Vector column[kVectors];
          for (int i = 0; i < kGroups; ++i) columns.Next(i, column);
        }
      });
    }
    if (direct == block.depth) return;
    const Block rest = PartOf(block, direct, block.depth - direct);
    Lines lines = AcrossDepth(side, rest);
    lines.Prepare(rest.depth, rest.count, panel.raw);
    PackPadded<Policy, kType>(lines, rest, panel.data + PanelBytes<Policy>(direct));
  });
  if constexpr (requires { Policy::ApplyFactors; }) Policy::ApplyFactors(side, block, panel);
}

// Adds a packed micro-panel to the sums of its columns, if they are needed.
template <class Policy>
void AddColumnSums(const Block& block, const Panel& panel) {
  if constexpr (Policy::kExact) {
    if (!block.sums) return;
    typename Policy::Vector total[kVectors] = {};
    const uint8_t* from = panel.data;
    for (int64_t g = 0; g < GroupsOf<Policy>(block); ++g) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v, from += kBytes) {
        total[v] = Policy::Dot(total[v], Policy::Ones(), Load<typename Policy::Vector>(from));
      }
    }
    int32_t totals[kNR];
    std::memcpy(totals, total, sizeof totals);
    for (int i = 0; i < kNR; ++i) panel.sum[i] += totals[i];
  }
}

}  // namespace jaxfp8::JAXFP8_ISA
