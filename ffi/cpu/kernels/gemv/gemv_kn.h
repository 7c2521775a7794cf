// GEMV with [K, N]. Only the rows are packed.
//
//     A packed [M][K]  (M <= kGemvRows)      B [K][N]
//     r0  a a a a ...                        k0  b b b b b b ...  --> read from end to end,
//     r1  a a a a ...                        k1  b b b b b b ...      8 lines at a time
//
//     for 8 lines:  for each kNR columns:    the micro-kernel, 8 deep
//       b = decode(8 x kNR)                  in registers
//       acc[r][kNR] += a * b                 accumulators of all columns in L1 or L2

#pragma once

#include <algorithm>

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/operand/lines.h"

namespace jaxfp8::JAXFP8_ISA {

// kNR columns of lines, from byte `at` of each on. With `kSubtract`, less their zero points; with
// `kSums`, adds to their sums.
template <class Policy, DType kType, bool kSubtract, bool kSums>
class ColumnsOfLines {
 public:
  using Vector = typename Policy::Vector;
  static constexpr int kGroups = 1;

  [[gnu::always_inline]] ColumnsOfLines(const uint8_t* const* lines, int64_t at, const double* zero,
                                        int32_t* sums)
      : lines_(lines), at_(at), zero_(zero), sums_(sums) {
    for (int v = 0; kSums && v < kVectors; ++v) total_[v] = Load<Vector>(sums_ + v * kLanes);
  }

  [[gnu::always_inline]] void Start() {}

  [[gnu::always_inline]] void Next(int, Vector (&column)[kVectors]) {
    const uint8_t* line[Policy::kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < Policy::kGroup; ++j) line[j] = lines_[j] + at_;
    lines_ += Policy::kGroup;
    Policy::template LoadLines<kType>(line, column);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      column[v] = zero_.Less(v, column[v]);
      if constexpr (kSums) total_[v] = Policy::Dot(total_[v], Policy::Ones(), column[v]);
    }
  }

  [[gnu::always_inline]] void StoreSums() const {
    for (int v = 0; kSums && v < kVectors; ++v) Store(sums_ + v * kLanes, total_[v]);
  }

 private:
  const uint8_t* const* lines_;
  int64_t at_;
  ColumnZeros<Policy, kSubtract> zero_;
  int32_t* sums_;
  Vector total_[kSums ? kVectors : 1];
};

// A line of one code, in place of lines beyond the last.
template <int kCode>
struct LineOf {
  constexpr LineOf() { std::fill_n(code, kGemvColumns, kCode); }
  uint8_t code[kGemvColumns];
};
template <int kCode>
inline constexpr LineOf<kCode> kLineOf;

template <class Policy, DType kType, int kCount, bool kSubtract, bool kSums>
class GemvKn {
 public:
  using Accs = Acc<Policy>[kCount][kGemvColumns];

  GemvKn(const Operand& side, const Block& block, const Panel& rows, const Panel& columns,
         void* acc)
      : side_(side),
        block_(block),
        rows_(rows),
        columns_(columns),
        acc_(*static_cast<Accs*>(acc)),
        width_((block.count + kNR - 1) / kNR * kNR) {
    if constexpr (kSubtract) LoadColumnFactors<Policy>(side, block, columns);
    for (int r = 0; r < kCount; ++r) std::fill_n(acc_[r], width_, Acc<Policy>{});
    if constexpr (kSums) std::fill_n(sums_, width_, 0);
  }

  void AddTo(double* sums, int64_t pitch, bool first) {
    Multiply();
    for (int64_t c = 0; c < width_; c += kFactorColumns) AddScaled(c, sums + c, pitch, first);
  }

  // Adds the scaled accumulators in float32, or stores them if `first`.
  void AddTo(float (&sums)[kCount][kGemvColumns], bool first) {
    Multiply();
    for (int64_t c = 0; c < width_; c += kFactorColumns) AddScaledF32(c, sums, first);
  }

 private:
  static constexpr int64_t kFactorColumns = 1024;  // their factors stay in L1

  void Multiply() {
    const Lines lines = AcrossDepth(side_, block_);
    const int64_t whole = block_.count / kNR * kNR;
    const int64_t readable = lines.Readable(block_.depth, block_.count - whole, kNR);
    for (int64_t k = 0; k < block_.depth; k += kLinesTogether) {
      const int64_t count = std::min<int64_t>(kLinesTogether, block_.depth - k);
      LinesTogether together(lines, block_, k);
      for (int64_t i = count; i < kLinesTogether; ++i)
        together.line[i] = kLineOf<Policy::template kZeroCode<kType>>.code;
      // The last columns are copied if a whole micro-panel would reach beyond the array.
      const bool copies = whole < width_ && k + count > readable;
      MultiplyLines(together, k, count, copies ? whole : width_);
      if (copies) MultiplyRest(together, k, count, whole);
    }
  }

  Block ColumnsFrom(int64_t column) const {
    Block block = block_;
    block.first += column;
    block.count = std::min(block_.count - column, kFactorColumns);
    return block;
  }

  void AddScaled(int64_t column, double* sums, int64_t pitch, bool first) {
    const Block block = ColumnsFrom(column);
    const int64_t width = std::min(width_ - column, kFactorColumns);
    const Panel columns = kSubtract ? FactorsFrom(columns_, column) : columns_;
    if constexpr (!kSubtract) LoadColumnFactors<Policy>(side_, block, columns);
    if constexpr (kSums) std::copy_n(sums_ + column, width, columns.sum);
    for (int r = 0; r < kCount; ++r) {
      AddScaledRow<Policy>(acc_[r] + column, rows_, r, columns, block.depth, width,
                           sums + r * pitch, first);
    }
  }

  void AddScaledF32(int64_t column, float (&sums)[kCount][kGemvColumns], bool first) {
    float scale[kFactorColumns];
    const int64_t width = std::min(width_ - column, kFactorColumns);
    Scales(side_, ColumnsFrom(column), width, scale);
    for (int r = 0; r < kCount; ++r) {
      const auto row = static_cast<float>(rows_.scale[r]);
      for (int64_t i = 0; i < width; i += kLanes) {
        float* sum = sums[r] + column + i;
        const F32 before = first ? F32{} : Load<F32>(sum);
        const F32 acc = Load<F32>(acc_[r] + column + i);
        Store(sum, FusedMultiplyAdd(acc, Load<F32>(scale + i) * row, before));
      }
    }
  }

  // Memory must be prefetched: without, one row from memory was 1.4 to 1.7x slower (AMD Zen 5).
  [[gnu::noinline]] void MultiplyLines(const LinesTogether& lines, int64_t k, int64_t count,
                                       int64_t columns) {
    const int64_t ahead = std::min(kLineAhead, columns);
    for (int64_t c = 0; c < columns; c += kNR) {
      for (int i = 0; i < kLinesTogether && c % 64 == 0; ++i) lines.Prefetch(i, c, ahead, columns);
      if (count == kLinesTogether) [[likely]] {
        MultiplyPanel<kLinesTogether>(lines.line, c, k, count, c);
      } else {
        MultiplySome(lines.line, c, k, count, c);
      }
    }
  }

  void MultiplyRest(const LinesTogether& lines, int64_t k, int64_t count, int64_t column) {
    uint8_t rest[kLinesTogether][kNR];
    const uint8_t* line[kLinesTogether];
    std::memset(rest, Policy::template kZeroCode<kType>, sizeof rest);
    for (int i = 0; i < kLinesTogether; ++i) {
      line[i] = rest[i];
      if (i < count) std::memcpy(rest[i], lines.line[i] + column, block_.count - column);
    }
    MultiplySome(line, 0, k, count, column);
  }

  [[gnu::noinline]] void MultiplySome(const uint8_t* const* lines, int64_t at, int64_t k,
                                      int64_t count, int64_t column) {
    MultiplyPanel<0>(lines, at, k, count, column);
  }

  // The micro-kernel for `count` lines from byte `at` on, for columns from `column` on.
  //   kLines  their number, or 0: any
  template <int kLines>
  [[gnu::always_inline]] void MultiplyPanel(const uint8_t* const* lines, int64_t at, int64_t k,
                                            int64_t count, int64_t column) {
    const uint8_t* rows = rows_.data + k * (4 / Policy::kGroup);
    RegisterTile<Policy, kCount> tile(acc_[0] + column, kGemvColumns, false);
    ColumnsOfLines<Policy, kType, kSubtract, kSums> columns(
        lines, at, columns_.zero + (kSubtract ? column : 0), sums_ + (kSums ? column : 0));
    const int64_t groups = ((kLines > 0 ? kLines : count) + Policy::kGroup - 1) / Policy::kGroup;
    tile.Multiply(rows, rows_.pitch, columns, groups);
    columns.StoreSums();
    tile.StoreTo(acc_[0] + column, kGemvColumns);
  }

  const Operand& side_;
  const Block& block_;
  const Panel& rows_;
  const Panel& columns_;
  Accs& acc_;
  const int64_t width_;
  int32_t sums_[kSums ? kGemvColumns : 1];
};

// The chunks of a run. Float32 sums of scaled accumulators lie behind the accumulators: in float64
// one row was 1.3x slower with a scale per 128 of K (Xeon with AMX).
template <class Policy, DType kType, int kCount, bool kSubtract, bool kSums>
void GemvKnRun(const Operand& side, const ChunkRun& run, const Panel& columns, void* acc,
               double* sums, int64_t pitch) {
  using Gemv = GemvKn<Policy, kType, kCount, kSubtract, kSums>;
  if constexpr (!Policy::kExact) {
    if (run.float32) {
      auto& f32_sums = static_cast<float (*)[kCount][kGemvColumns]>(acc)[1];
      for (int64_t c = 0; c < run.count; ++c) {
        Gemv(side, run.blocks[c], run.rows[c], columns, acc).AddTo(f32_sums, c == 0);
      }
      for (int r = 0; r < kCount; ++r) {
        AddF32Row(f32_sums[r], run.blocks[0].count, sums + r * pitch, run.first);
      }
      return;
    }
  }
  for (int64_t c = 0; c < run.count; ++c) {
    Gemv(side, run.blocks[c], run.rows[c], columns, acc).AddTo(sums, pitch, run.first && c == 0);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA
