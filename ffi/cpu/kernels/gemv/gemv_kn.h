// Columns side by side, or prepared, times few rows, for the chunks of a run.

#ifndef JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_H_
#define JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_H_

#include <algorithm>

#include "cpu/kernels/gemm/microkernel.h"
#include "cpu/kernels/gemm/pack.h"
#include "cpu/kernels/gemv/gemv_kn_loops.h"
#include "cpu/kernels/operand/scales.h"

namespace jaxfp8::JAXFP8_ISA {

// The products of kCount rows with columns across the depth. What is found of a chunk is added to
// the sums in float64, or where sums are narrow, in float32, in the order in which it was found:
// for blocks of 128 x 128 one row took 1.2 times as long as without otherwise, so 1.05 times (AMD
// Zen 4).
template <class Sums, DType kType, int kCount>
class RunAcross {
 public:
  // What is found of a chunk, and behind it what all are worth where sums are narrow.
  using FoundOf = FoundRows<Sums, kCount>;

  RunAcross(const Side& side, const ChunkRun& run, const Panel& right, void* room)
      : side_(side),
        run_(run),
        right_(right),
        found_(static_cast<FoundOf*>(room)[0]),
        worth_(static_cast<FoundOf*>(room)[1]),
        width_(Strips(run.blocks[0]) * kColumns),
        narrow_(!Sums::kExact && run.narrow) {}

  void AddTo(double* sums, int64_t pitch) {
    sums_ = sums;
    pitch_ = pitch;
    for (int r = 0; r < kCount && narrow_; ++r) std::fill_n(worth_[r], width_, Found<Sums>{});
    for (int64_t c = 0; c < run_.count; ++c) AddChunk(c);
    if (narrow_) AddWorth();
  }

 private:
  static constexpr int64_t kSomeStrips = 32;

  void AddChunk(int64_t c) {
    const Block& block = run_.blocks[c];
    const Panel& left = run_.left[c];
    first_ = run_.first && c == 0;
    for (int r = 0; r < kCount; ++r) std::fill_n(found_[r], width_, Found<Sums>{});
    if constexpr (Sums::kTotals) std::fill_n(of_columns_, width_, 0);
    if constexpr (Sums::kLessZero) StartColumns<Sums>(side_, block, right_);
    if (side_.prepared) return AddQuads(block, left);
    if constexpr (Sums::kTotals && requires { typename Sums::template Parts<kCount>; }) {
      typename Sums::template Parts<kCount> rows(left, block.depth);
      if (rows.Pay()) {
        return AddLines<InTwo<typename Sums::Alone>>(block, rows.WithFactorsOf(left));
      }
    }
    AddLines<Sums>(block, left);
  }

  // Prepared columns are read for more of the depth in one go, so that second parts are oftener
  // needed.
  void AddQuads(const Block& block, const Panel& left) {
    FindPrepared<Sums, kType, kCount>(side_, block, left, right_, found_, of_columns_);
    AddFound(block, left);
  }

  template <class Parts>
  void AddLines(const Block& block, const Panel& left) {
    const Lines lines = AcrossDepth(side_, block);
    const LinesOfBlock whole(block);
    FindLines<Parts, kType, kCount>(lines, block, left, right_, found_, of_columns_);
    const int64_t groups = GroupsOf<Sums>(block);
    for (int64_t s = 0; s < Strips(block); ++s) {
      const int64_t c = s * kColumns;
      const int64_t done = c < whole.columns ? whole.depth / Sums::kGroup : 0;
      const bool rest = done < groups;
      if (done > 0 && (rest || !narrow_)) ExchangeFound(s);
      if (!rest) continue;
      SumStripGroups<Parts, kType, kCount>(lines, block, s, done, groups, left,
                                           {found_[0] + c, of_columns_ + c, right_.zero + c});
      if (narrow_) ExchangeFound(s);
    }
    AddFound(block, left);
  }

  // From lanes to the order of columns, or back.
  void ExchangeFound(int64_t s) {
    if constexpr (kByLanes<Sums, kType>) {
      for (int r = 0; r < kCount; ++r) ExchangeLanes(found_[r] + s * kColumns);
      if constexpr (Sums::kTotals) ExchangeLanes(of_columns_ + s * kColumns);
    }
  }

  // Some strips at a time: the factors of all columns would fill an L1.
  void AddFound(const Block& block, const Panel& left) {
    for (int64_t s = 0; s < Strips(block); s += kSomeStrips) {
      Block some = StripOf(block, s, 0, block.depth);
      some.count = std::min(block.count - s * kColumns, kSomeStrips * kColumns);
      if constexpr (!Sums::kExact) {
        if (narrow_) {
          AddNarrow(some, left, s * kColumns);
          continue;
        }
      }
      AddSome(some, left, s);
    }
  }

  // Adds the worth of what was found from strip s on.
  void AddSome(const Block& block, const Panel& left, int64_t s) {
    const int64_t c = s * kColumns, width = Strips(block) * kColumns;
    double scale[kSomeStrips * kColumns], zero[kSomeStrips * kColumns];
    double sum[kSomeStrips * kColumns];
    Panel factors = {nullptr, 0, scale, zero, sum, nullptr};
    if constexpr (Sums::kLessZero) {
      factors = PanelOf(right_, s, 0);
    } else {
      StartColumns<Sums>(side_, block, factors);
    }
    if constexpr (Sums::kTotals) std::copy_n(of_columns_ + c, width, sum);
    for (int r = 0; r < kCount; ++r) {
      AddRow<Sums>(found_[r] + c, left, r, factors, block.depth, width, sums_ + r * pitch_ + c,
                   first_);
    }
  }

  // The same in float32 from column c on, by lanes if lines are.
  void AddNarrow(const Block& block, const Panel& left, int64_t c) {
    const int64_t width = Strips(block) * kColumns;
    Found<Sums> scale[kSomeStrips * kColumns];
    Scales(side_, block, width, scale);
    if constexpr (kByLanes<Sums, kType>) {
      const bool alike = side_.prepared || AreAlikeInStrips(side_.tile_free, block.first);
      for (int64_t i = 0; !alike && i < width; i += kColumns) ExchangeLanes(scale + i);
    }
    for (int r = 0; r < kCount; ++r) {
      const auto of_row = static_cast<float>(left.scale[r]);
      for (int64_t i = 0; i < width; i += kLanes) {
        const F32 both = Load<F32>(scale + i) * of_row;
        const F32 worth = Load<F32>(worth_[r] + c + i);
        Store(worth_[r] + c + i, MultiplyAdd(Load<F32>(found_[r] + c + i), both, worth));
      }
    }
  }

  void AddWorth() {
    for (int r = 0; r < kCount; ++r) {
      if constexpr (kByLanes<Sums, kType>) {
        for (int64_t c = 0; !side_.prepared && c < width_; c += kColumns) {
          ExchangeLanes(worth_[r] + c);
        }
      }
      double* to = sums_ + r * pitch_;
      for (int64_t i = 0; i < width_; ++i) to[i] = worth_[r][i] + (run_.first ? 0 : to[i]);
    }
  }

  const Side& side_;
  const ChunkRun& run_;
  const Panel& right_;
  FoundOf& found_;
  FoundOf& worth_;
  const int64_t width_;
  const bool narrow_;
  double* sums_ = nullptr;
  int64_t pitch_ = 0;
  bool first_ = false;  // whether no sums are there yet
  int32_t of_columns_[kFewColumns];
};

}  // namespace jaxfp8::JAXFP8_ISA

#endif  // JAXFP8_CPU_KERNELS_GEMV_GEMV_KN_H_
