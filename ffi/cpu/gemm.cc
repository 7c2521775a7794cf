#include "cpu/gemm.h"

#include <algorithm>
#include <optional>

#include "cpu/plan.h"
#include "cpu/scratch.h"

namespace jaxfp8 {
namespace {

// The factors of `lines` lines, one after the other in memory from `at`.
Panel WithFactors(uint8_t* data, int64_t pitch, uint8_t* at, int64_t lines, uint8_t* raw) {
  const int64_t step = Scratch::Padded(lines * sizeof(double));
  return {data,
          pitch,
          reinterpret_cast<double*>(at),
          reinterpret_cast<double*>(at + step),
          reinterpret_cast<double*>(at + 2 * step),
          raw};
}

// The panel without its first rows, or with the factors of later columns.
Panel From(const Panel& panel, int64_t row) {
  return {panel.data + row * panel.pitch,
          panel.pitch,
          panel.scale + row,
          panel.zero + row,
          panel.sum + row,
          panel.raw};
}

NarrowFactors From(const NarrowFactors& lines, int64_t line) {
  return {lines.scale + line, lines.zero + line, lines.sum + line};
}

NarrowSums From(const NarrowSums& narrow, int64_t row, int64_t column) {
  return {From(narrow.rows, row), From(narrow.columns, column),
          narrow.sums + row * narrow.pitch + column, narrow.pitch, narrow.first};
}

// The same factors in float32, again one after the other from `at`.
NarrowFactors Narrowed(const Panel& panel, int64_t lines, float* at) {
  float* zero = std::copy_n(panel.scale, lines, at);
  float* sum = std::copy_n(panel.zero, lines, zero);
  std::copy_n(panel.sum, lines, sum);
  return {at, zero, sum};
}

// Whether a chunk is the first, and the last, of the depth.
struct Ends {
  bool first, last;
};

// Rows that are multiplied together.
struct Tile {
  int64_t row;
  int height;
};

// A thread that multiplies packed columns.
class Entered {
 public:
  Entered(const Kernel& kernel, int height) : kernel_(kernel) {
    if (kernel.enter) kernel.enter(height);
  }
  ~Entered() {
    if (kernel_.leave) kernel_.leave();
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  const Kernel& kernel_;
};

// One share of the output: some rows by some columns of one batch element.
class Share {
 public:
  Share(const Problem& problem, const Kernel& kernel, const Plan& plan, int64_t share)
      : problem_(problem), kernel_(kernel), plan_(plan) {
    batch_ = share / (plan.row_shares * plan.column_shares);
    row_ = share / plan.column_shares % plan.row_shares * plan.row_block;
    rows_ = std::min(plan.row_block, problem.rows - row_);
    height_ = static_cast<int>(Blocks(rows_, Blocks(rows_, kernel.height)));
    const int64_t column_share = share % plan.column_shares;
    const bool first = column_share == 0;
    column_ = first ? 0 : plan.first_columns + (column_share - 1) * plan.share_columns;
    columns_ = std::min(first ? plan.first_columns : plan.share_columns, problem.columns - column_);
    CutTiles();
    TakeScratch();
  }

  void Run() {
    std::optional<Entered> entered;
    if (!plan_.few) entered.emplace(kernel_, height_);
    for (int64_t done = 0; done < columns_; done += plan_.column_block) {
      const int64_t count = std::min(plan_.column_block, columns_ - done);
      for (const Round& round : plan_.rounds) MultiplyRound(round, column_ + done, count);
      if (plan_.rounds.empty()) FinishEmpty(column_ + done, count);
    }
  }

 private:
  void TakeScratch() {
    Scratch& scratch = Scratch::OfThread();
    const int64_t factors = 3 * Scratch::Padded(plan_.factors * sizeof(double));
    scratch.Reserve(plan_.rows_bytes + plan_.columns_bytes + plan_.raw_bytes + plan_.found_bytes +
                    plan_.narrow_bytes + 3 * (plan_.wide + plan_.row_block) * sizeof(float) +
                    plan_.sums_bytes + factors + 8 * 64);
    packed_rows_ = scratch.Take<uint8_t>(plan_.rows_bytes);
    uint8_t* columns = scratch.Take<uint8_t>(plan_.columns_bytes);
    raw_ = scratch.Take<uint8_t>(plan_.raw_bytes);
    sums_ = scratch.Take<double>(plan_.sums_bytes / sizeof(double));
    narrow_ = scratch.Take<float>(plan_.narrow_bytes / sizeof(float));
    narrow_factors_ = scratch.Take<float>(3 * (plan_.wide + plan_.row_block));
    found_ = scratch.Take<float>(plan_.found_bytes / sizeof(float));
    right_ = WithFactors(columns, plan_.strip_pitch, scratch.Take<uint8_t>(factors), plan_.factors,
                         raw_);
  }

  Panel LeftPanel(const Chunk& chunk) const {
    uint8_t* data = packed_rows_ + chunk.offset;
    uint8_t* factors = data + Scratch::Padded(plan_.row_block * chunk.pitch);
    return WithFactors(data, chunk.pitch, factors, plan_.row_block, raw_);
  }

  Block RowsOf(const Chunk& chunk, int64_t first, int64_t count) const {
    return BlockOf(chunk, first, count, Shifted(problem_.rhs, kernel_.shifted_columns));
  }

  Block ColumnsOf(const Chunk& chunk, int64_t first, int64_t count) const {
    const Side& left = problem_.lhs;
    const bool less_zero = kernel_.rows_less_zero && left.near_zeros;
    const bool sums =
        less_zero ? left.dtype == kernel_.shifted_rows : Shifted(left, kernel_.shifted_rows);
    return BlockOf(chunk, first, count, sums);
  }

  Block BlockOf(const Chunk& chunk, int64_t first, int64_t count, bool sums) const {
    const int64_t ahead = problem_.depth - chunk.start - chunk.depth;
    return {batch_, first, count, chunk.start, chunk.depth, sums, ahead, plan_.ask};
  }

  // Whether the values of a side are off by a constant, which the sums of the other make good.
  static bool Shifted(const Side& side, DType shifted) {
    return side.zero_point || side.dtype == shifted;
  }

  void PackRows(const Round& round) {
    if (packed_ == &round) return;
    packed_ = &round;
    const bool along = plan_.few && problem_.rhs.Along();
    const auto pack = along ? kernel_.pack_rows_along : kernel_.pack_rows;
    const int64_t slab = along ? rows_ : kSlab;
    for (size_t i = round.begin; i < round.end; ++i) {
      const Chunk& chunk = plan_.chunks[i];
      const Panel panel = LeftPanel(chunk);
      for (int64_t row = 0; row < rows_; row += slab) {
        const int64_t count = std::min(slab, rows_ - row);
        pack(problem_.lhs, RowsOf(chunk, row_ + row, count), From(panel, row));
      }
    }
  }

  void MultiplyRound(const Round& round, int64_t column, int64_t count) {
    PackRows(round);
    for (int64_t done = 0; done < count; done += plan_.wide) {
      const int64_t width = std::min<int64_t>(plan_.wide, count - done);
      if (plan_.few) {
        MultiplyFew(round, column + done, width, sums_ + done);
        continue;
      }
      for (size_t i = round.begin; i < round.end; ++i) {
        const Chunk& chunk = plan_.chunks[i];
        const Block block = ColumnsOf(chunk, column + done, width);
        MultiplyMany(chunk, block, EndsOf(i, 1), done);
      }
    }
  }

  Ends EndsOf(size_t chunk, size_t count) const {
    return {chunk == 0, chunk + count == plan_.chunks.size()};
  }

  void MultiplyFew(const Round& round, int64_t column, int64_t width, double* sums) {
    Block blocks[kRunChunks];
    for (size_t done = round.begin, count; done < round.end; done += count) {
      count = plan_.EndOfRun(done, round.end) - done;
      const Chunk* chunks = &plan_.chunks[done];
      for (size_t i = 0; i < count; ++i) blocks[i] = ColumnsOf(chunks[i], column, width);
      const Ends ends = EndsOf(done, count);
      for (int64_t row = 0; row < rows_; row += plan_.few_rows) {
        MultiplyRun(chunks, blocks, count, ends.first, row, sums);
      }
      for (int64_t row = 0; ends.last && row < rows_; ++row) {
        kernel_.finish(sums + row * plan_.sums_pitch, problem_.epilogue, At(row, blocks[0]));
      }
    }
  }

  // The rows from `row` on.
  void MultiplyRun(const Chunk* chunks, const Block* blocks, size_t count, bool first, int64_t row,
                   double* sums) {
    Panel left[kRunChunks];
    for (size_t i = 0; i < count; ++i) left[i] = From(LeftPanel(chunks[i]), row);
    const ChunkRun run{blocks, left, static_cast<int64_t>(count), first, plan_.narrow};
    const int rows = static_cast<int>(std::min(plan_.few_rows, rows_ - row));
    kernel_.multiply_few(problem_.rhs, run, rows, right_, found_, sums + row * plan_.sums_pitch,
                         plan_.sums_pitch);
  }

  void MultiplyMany(const Chunk& chunk, const Block& block, Ends ends, int64_t column) {
    kernel_.start_columns(problem_.rhs, block, right_);
    const Panel left = LeftPanel(chunk);
    const int64_t strips = Blocks(block.count, kernel_.columns);
    for (int64_t done = 0; done < block.depth; done += plan_.slice) {
      const Block slice = SliceOf(block, done);
      if (plan_.packing == Packing::kAhead) {
        kernel_.pack_columns(problem_.rhs, slice, right_);
      } else if (plan_.packing == Packing::kNone && slice.sums) {
        kernel_.sum_columns(problem_.rhs, slice, right_);
      }
      const bool whole = done + slice.depth == block.depth;
      NarrowSums narrow{};
      if (plan_.narrow && !ends.last && whole) narrow = Narrow(left, block, ends.first, column);
      for (int64_t strip = 0; strip < strips; ++strip) {
        for (int64_t at = 0; at < slice.depth; at += plan_.stretch) {
          const Block part = StretchOf(slice, strip, at);
          const bool last = at + part.depth == slice.depth;
          MultiplyStrip(left, part, StripAt(slice, strip, at), strip, done + at,
                        last && narrow.sums ? &narrow : nullptr);
        }
      }
    }
    const int64_t width = strips * kernel_.columns;
    if (plan_.narrow && !ends.last) return;
    for (int64_t row = 0; row < rows_; ++row) {
      const float* found = found_ + row * plan_.found_pitch;
      double* sums = sums_ + column + row * plan_.sums_pitch;
      if (plan_.narrow) std::copy_n(narrow_ + column + row * plan_.narrow_pitch, width, sums);
      if (!ends.last) {
        kernel_.add(found, left, static_cast<int>(row), right_, block.depth, width, sums,
                    ends.first);
      } else {
        kernel_.finish_found(found, left, static_cast<int>(row), right_, block.depth,
                             ends.first ? nullptr : sums, problem_.epilogue, At(row, block));
      }
    }
  }

  // Where the sums of a block's columns are added in float32; the factors of both are known by now.
  NarrowSums Narrow(const Panel& left, const Block& block, bool first, int64_t column) const {
    const int64_t columns = RoundUp(block.count, kernel_.columns);
    float* of_rows = narrow_factors_ + 3 * plan_.wide;
    const NarrowFactors rows = Narrowed(left, rows_, of_rows);
    for (int64_t row = 0; row < rows_; ++row) {
      of_rows[2 * rows_ + row] -= static_cast<float>(block.depth) * rows.zero[row];
    }
    return {rows, Narrowed(right_, columns, narrow_factors_), narrow_ + column, plan_.narrow_pitch,
            first};
  }

  Block SliceOf(const Block& block, int64_t done) const {
    Block slice = block;
    slice.start += done;
    slice.depth = std::min(plan_.slice, block.depth - done);
    slice.ahead += block.depth - done - slice.depth;
    return slice;
  }

  // A strip of a slice, from `at` of it on.
  Block StretchOf(const Block& slice, int64_t strip, int64_t at) const {
    Block part = slice;
    part.first += strip * kernel_.columns;
    part.count = std::min<int64_t>(slice.count - strip * kernel_.columns, kernel_.columns);
    part.start += at;
    part.depth = std::min(plan_.stretch, slice.depth - at);
    part.ahead += slice.depth - at - part.depth;
    return part;
  }

  // Where a strip lies as it is multiplied, from `at` of a slice on.
  const uint8_t* StripAt(const Block& slice, int64_t strip, int64_t at) const {
    const uint8_t* start = right_.data + strip * right_.pitch;
    if (plan_.packing == Packing::kNone) {
      start =
          PreparedAt(problem_.rhs, slice.batch, slice.first + strip * kernel_.columns, slice.start);
    }
    return start + at * kernel_.columns * kernel_.size;
  }

  // All rows times a strip of columns, from `start` of the chunk on.
  void MultiplyStrip(const Panel& left, const Block& part, const uint8_t* columns, int64_t strip,
                     int64_t start, const NarrowSums* narrow) {
    const int64_t column = strip * kernel_.columns;
    const auto multiply =
        plan_.packing == Packing::kNone ? kernel_.multiply_in_place : kernel_.multiply;
    UpcomingLines next{};
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const auto [row, height] = tile_of_[tile];
      const RowsOfTile rows{left.data + row * left.pitch + start * kernel_.size, left.pitch,
                            height};
      float* found = found_ + row * plan_.found_pitch + column;
      NarrowSums here;
      if (narrow) here = From(*narrow, row, column);
      const NarrowSums* to = narrow ? &here : nullptr;
      if (tile == 0 && plan_.packing == Packing::kByFirstRows) {
        kernel_.pack_and_multiply(problem_.rhs, part, From(right_, column), tiles_ - 1, rows, found,
                                  plan_.found_pitch, start == 0, to, next);
      } else {
        multiply(rows, columns, part.depth, found, plan_.found_pitch, start == 0, to, next);
      }
    }
  }

  // Even heights: of at most 6, 16 rows are 6 + 5 + 5, not 6 + 6 + 4.
  void CutTiles() {
    tiles_ = Blocks(rows_, kernel_.rows);
    for (int64_t tile = 0, row = 0; tile < tiles_; ++tile) {
      const int64_t next = std::min(RoundUp(rows_ * (tile + 1) / tiles_, height_), rows_);
      tile_of_[tile] = {row, static_cast<int>(RoundUp(next - row, height_))};
      row = next;
    }
  }

  // The columns of a block in one of the share's rows.
  Stretch At(int64_t row, const Block& block) const {
    return {batch_, row_ + row, block.first, block.count};
  }

  // What no products add up to.
  void FinishEmpty(int64_t column, int64_t count) {
    const Block block{batch_, column, count, 0, 0, false, 0, Ask::kNone};
    std::fill_n(sums_, plan_.column_block, 0.0);
    for (int64_t row = 0; row < rows_; ++row) {
      kernel_.finish(sums_, problem_.epilogue, At(row, block));
    }
  }

  const Problem& problem_;
  const Kernel& kernel_;
  const Plan& plan_;
  int64_t batch_, row_, rows_, column_, columns_;
  int64_t tiles_;
  Tile tile_of_[kMostTiles];
  int height_;  // of the kernel's tiles: even, and as low as there are rows
  const Round* packed_ = nullptr;
  uint8_t* packed_rows_;
  uint8_t* raw_;
  double* sums_;
  float* found_;  // or int32_t
  float* narrow_;
  float* narrow_factors_;
  Panel right_;
};

}  // namespace

void RunGemm(const Problem& problem, const Kernel& kernel, Pool& pool) {
  const Plan plan = MakePlan(problem, kernel, pool.threads());
  ParallelFor(pool, plan.threads, plan.shares,
              [&](int64_t share) { Share(problem, kernel, plan, share).Run(); });
}

}  // namespace jaxfp8
