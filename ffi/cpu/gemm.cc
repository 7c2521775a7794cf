#include <algorithm>
#include <optional>

#include "cpu/plan.h"
#include "cpu/run.h"
#include "cpu/scratch.h"

namespace jaxfp8 {
namespace {

// The factors of `count` rows or columns, one array after the other in memory from `at`.
Panel WithFactors(uint8_t* data, int64_t pitch, uint8_t* at, int64_t count, uint8_t* raw) {
  const int64_t step = Scratch::Padded(count * sizeof(double));
  return {data,
          pitch,
          reinterpret_cast<double*>(at),
          reinterpret_cast<double*>(at + step),
          reinterpret_cast<double*>(at + 2 * step),
          raw};
}

// The panel without its first rows.
Panel From(const Panel& panel, int64_t row) {
  return FactorsFrom(DataFrom(panel, row * panel.pitch), row);
}

F32Factors From(const F32Factors& factors, int64_t first) {
  return {factors.scale + first, factors.zero + first, factors.sum + first};
}

F32Sums From(const F32Sums& sums, int64_t row, int64_t column) {
  return {From(sums.rows, row), From(sums.columns, column), sums.sums + row * sums.pitch + column,
          sums.pitch, sums.first};
}

// The same factors in float32, again one array after the other from `at`. Only exact accumulators
// need zero points and sums.
F32Factors InFloat32(const Panel& panel, int64_t count, bool exact, float* at) {
  float* zero = std::copy_n(panel.scale, count, at);
  float* sum = zero + count;
  if (exact) {
    std::copy_n(panel.zero, count, zero);
    std::copy_n(panel.sum, count, sum);
  }
  return {at, zero, sum};
}

// Whether a chunk is the first, and the last, of K.
struct Ends {
  bool first, last;
};

// Rows of one register tile.
struct Tile {
  int64_t row;
  int height;
};

// A thread's state in a kernel with hardware tiles.
class Entered {
 public:
  Entered(const GemmKernel& gemm, int tile_rows) : gemm_(gemm) {
    if (gemm.enter) gemm.enter(tile_rows);
  }
  ~Entered() {
    if (gemm_.leave) gemm_.leave();
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  const GemmKernel& gemm_;
};

// One share of the output: some rows by some columns of one batch element.
class Share {
 public:
  Share(const CanonicalDot& problem, const Kernel& kernel, const BlockingPlan& plan, int64_t index)
      : problem_(problem), kernel_(kernel), gemm_(kernel.gemm), plan_(plan) {
    const SharePlan& share = plan.share;
    batch_ = index / (share.down * share.across);
    row_ = index / share.across % share.down * share.rows;
    rows_ = std::min(share.rows, problem.rows - row_);
    column_ = index % share.across * share.columns;
    columns_ = std::min(share.columns, problem.columns - column_);
    tile_rows_ = static_cast<int>(DivideUp(rows_, DivideUp(rows_, gemm_.tile_rows)));
    CutTiles();
    TakeScratch();
  }

  void Run() {
    std::optional<Entered> entered;
    if (!plan_.gemv) entered.emplace(gemm_, tile_rows_);
    for (int64_t done = 0; done < columns_; done += plan_.block.columns) {
      const int64_t count = std::min(plan_.block.columns, columns_ - done);
      for (const Round& round : plan_.depth.rounds) MultiplyRound(round, column_ + done, count);
      if (plan_.depth.rounds.empty()) StoreEmpty(column_ + done, count);
    }
  }

 private:
  void TakeScratch() {
    const ScratchPlan& sizes = plan_.scratch;
    Scratch& scratch = Scratch::OfThread();
    const int64_t factors = 3 * Scratch::Padded(sizes.factors * sizeof(double));
    const int64_t f32_factors = 3 * (plan_.block.pass + plan_.block.rows);
    scratch.Reserve(sizes.rows + sizes.columns + sizes.raw + sizes.acc + sizes.f32_sums +
                    f32_factors * sizeof(float) + sizes.sums + factors + 8 * 64);
    packed_rows_ = scratch.Take<uint8_t>(sizes.rows);
    uint8_t* columns = scratch.Take<uint8_t>(sizes.columns);
    raw_ = scratch.Take<uint8_t>(sizes.raw);
    sums_ = scratch.Take<double>(sizes.sums / sizeof(double));
    f32_sums_ = scratch.Take<float>(sizes.f32_sums / sizeof(float));
    f32_factors_ = scratch.Take<float>(f32_factors);
    acc_ = scratch.Take<float>(sizes.acc / sizeof(float));
    columns_panel_ = WithFactors(columns, 0, scratch.Take<uint8_t>(factors), sizes.factors, raw_);
  }

  Panel RowsPanel(const Chunk& chunk) const {
    uint8_t* data = packed_rows_ + chunk.offset;
    uint8_t* factors = data + Scratch::Padded(plan_.block.rows * chunk.pitch);
    return WithFactors(data, chunk.pitch, factors, plan_.block.rows, raw_);
  }

  // Whether a side's packed values are off by a constant. The sums of the other side correct this.
  static bool IsShifted(const Operand& side, DType shifted) {
    return side.zero_point || side.dtype == shifted;
  }

  Block RowsOf(const Chunk& chunk, int64_t first, int64_t count) const {
    return BlockOf(chunk, first, count, IsShifted(problem_.rhs, kernel_.packed.shifted_columns));
  }

  Block ColumnsOf(const Chunk& chunk, int64_t first, int64_t count) const {
    const Operand& left = problem_.lhs;
    const DType shifted = kernel_.packed.shifted_rows;
    const bool subtracts = kernel_.packed.subtracts_row_zeros && left.near_zeros;
    return BlockOf(chunk, first, count,
                   subtracts ? left.dtype == shifted : IsShifted(left, shifted));
  }

  Block BlockOf(const Chunk& chunk, int64_t first, int64_t count, bool sums) const {
    const int64_t ahead = problem_.depth - chunk.start - chunk.depth;
    return {batch_, first, count, chunk.start, chunk.depth, sums, ahead};
  }

  void PackRows(const Round& round) {
    if (packed_ == &round) return;
    packed_ = &round;
    const bool nk = plan_.gemv && problem_.rhs.Along();
    const auto pack = nk ? kernel_.gemv.pack_rows_nk : gemm_.pack_rows;
    // Transposed rows are packed in one call, if one GEMV pass takes them all.
    const int64_t step = nk && rows_ <= kernel_.gemv.nk_pass_rows ? rows_ : kPackRows;
    for (size_t i = round.begin; i < round.end; ++i) {
      const Chunk& chunk = plan_.depth.chunks[i];
      const Panel panel = RowsPanel(chunk);
      for (int64_t row = 0; row < rows_; row += step) {
        const int64_t count = std::min(step, rows_ - row);
        pack(problem_.lhs, RowsOf(chunk, row_ + row, count), From(panel, row));
      }
    }
  }

  void MultiplyRound(const Round& round, int64_t column, int64_t count) {
    PackRows(round);
    for (int64_t done = 0; done < count; done += plan_.block.pass) {
      const int64_t width = std::min<int64_t>(plan_.block.pass, count - done);
      if (plan_.gemv) {
        Gemv(round, column + done, width, sums_ + done);
        continue;
      }
      for (size_t i = round.begin; i < round.end; ++i) {
        const Chunk& chunk = plan_.depth.chunks[i];
        Gemm(chunk, ColumnsOf(chunk, column + done, width), EndsOf(i, 1), done);
      }
    }
  }

  Ends EndsOf(size_t chunk, size_t count) const {
    return {chunk == 0, chunk + count == plan_.depth.chunks.size()};
  }

  void Gemv(const Round& round, int64_t column, int64_t width, double* sums) {
    const int64_t pitch = plan_.scratch.sums_pitch;
    Block blocks[kMaxRunChunks];
    for (size_t done = round.begin, count; done < round.end; done += count) {
      count = plan_.depth.EndOfRun(done, round.end) - done;
      const Chunk* chunks = &plan_.depth.chunks[done];
      for (size_t i = 0; i < count; ++i) blocks[i] = ColumnsOf(chunks[i], column, width);
      const Ends ends = EndsOf(done, count);
      for (int64_t row = 0; row < rows_; row += plan_.block.gemv_rows) {
        GemvRun(chunks, blocks, count, ends.first, row, sums + row * pitch);
      }
      for (int64_t row = 0; ends.last && row < rows_; ++row) {
        kernel_.epilogue.store(sums + row * pitch, problem_.epilogue, SpanOf(row, blocks[0]));
      }
    }
  }

  // The rows from `row` on.
  void GemvRun(const Chunk* chunks, const Block* blocks, size_t count, bool first, int64_t row,
               double* sums) {
    Panel rows[kMaxRunChunks];
    for (size_t i = 0; i < count; ++i) rows[i] = From(RowsPanel(chunks[i]), row);
    const ChunkRun run{blocks, rows, static_cast<int64_t>(count), first, plan_.depth.float32};
    const int height = static_cast<int>(std::min(plan_.block.gemv_rows, rows_ - row));
    kernel_.gemv.multiply(problem_.rhs, run, height, columns_panel_, acc_, sums,
                          plan_.scratch.sums_pitch);
  }

  // All rows times the columns of a block. `column` counts from the first column with sums kept.
  void Gemm(const Chunk& chunk, const Block& block, Ends ends, int64_t column) {
    gemm_.load_factors(problem_.rhs, block, columns_panel_);
    const Panel rows = RowsPanel(chunk);
    for (int64_t k = 0; k < block.depth; k += gemm_.panel_depth) {
      const int64_t depth = std::min<int64_t>(gemm_.panel_depth, block.depth - k);
      const bool last = k + depth == block.depth;
      F32Sums f32_sums{};
      if (plan_.depth.float32 && !ends.last && last) {
        f32_sums = F32SumsOf(rows, block, ends.first, column);
      }
      for (int64_t c = 0; c < block.count; c += gemm_.nr) {
        Block panel = block;
        panel.first += c;
        panel.count = std::min<int64_t>(block.count - c, gemm_.nr);
        panel.start += k;
        panel.depth = depth;
        panel.ahead += block.depth - k - depth;
        MultiplyPanel(rows, panel, c, k, f32_sums.sums ? &f32_sums : nullptr);
      }
    }
    if (plan_.depth.float32 && !ends.last) return;
    for (int64_t row = 0; row < rows_; ++row) AddOrStore(rows, row, block, ends, column);
  }

  // Adds the scaled accumulators of a chunk, or stores the results if it is the last.
  void AddOrStore(const Panel& rows, int64_t row, const Block& block, Ends ends, int64_t column) {
    const float* acc = acc_ + row * plan_.scratch.acc_pitch;
    const int64_t width = RoundUp(block.count, gemm_.nr);
    double* sums = sums_ + column + row * plan_.scratch.sums_pitch;
    if (plan_.depth.float32) {
      std::copy_n(f32_sums_ + column + row * plan_.scratch.f32_pitch, width, sums);
    }
    if (ends.last) {
      kernel_.epilogue.store_scaled(acc, rows, static_cast<int>(row), columns_panel_, block.depth,
                                    ends.first ? nullptr : sums, problem_.epilogue,
                                    SpanOf(row, block));
    } else {
      gemm_.add_scaled(acc, rows, static_cast<int>(row), columns_panel_, block.depth, width, sums,
                       ends.first);
    }
  }

  // The destination for a block's scaled sums in float32. Called when the sums of rows are known;
  // those of columns are not needed (see HoldsExactSums in plan.cc).
  F32Sums F32SumsOf(const Panel& rows, const Block& block, bool first, int64_t column) const {
    const int64_t columns = RoundUp(block.count, gemm_.nr);
    float* of_rows = f32_factors_ + 3 * plan_.block.pass;
    const bool exact = kernel_.compute == ComputeType::kInt32;
    const F32Factors row_factors = InFloat32(rows, rows_, exact, of_rows);
    for (int64_t row = 0; exact && row < rows_; ++row) {
      of_rows[2 * rows_ + row] -= static_cast<float>(block.depth) * row_factors.zero[row];
    }
    return {row_factors, InFloat32(columns_panel_, columns, exact, f32_factors_),
            f32_sums_ + column, plan_.scratch.f32_pitch, first};
  }

  // All rows times a micro-panel, from `k` of the chunk on.
  void MultiplyPanel(const Panel& rows, const Block& block, int64_t column, int64_t k,
                     const F32Sums* f32_sums) {
    const Panel panel = From(columns_panel_, column);
    const int64_t pitch = plan_.scratch.acc_pitch;
    const uint8_t* data = rows.data + k * kernel_.packed.size;
    const uint8_t* columns = nullptr;
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const auto [row, height] = tile_of_[tile];
      const PackedRows packed{data + row * rows.pitch, rows.pitch, height};
      float* acc = acc_ + row * pitch + column;
      F32Sums here;
      if (f32_sums) here = From(*f32_sums, row, column);
      const F32Sums* to = f32_sums ? &here : nullptr;
      if (tile == 0) {
        columns = gemm_.pack_and_multiply(problem_.rhs, block, panel, tiles_ > 1, packed, acc,
                                          pitch, k == 0, to);
      } else {
        gemm_.multiply(packed, columns, block.depth, acc, pitch, k == 0, to);
      }
    }
  }

  // Even heights, the lowest first: of at most 6, 16 rows are 5 + 5 + 6, not 6 + 6 + 4. Packing
  // leaves fewer registers: with AVX2 and the highest first, 16 rows were 1.05x slower.
  void CutTiles() {
    tiles_ = DivideUp(rows_, gemm_.mr);
    for (int64_t tile = 0, row = 0; tile < tiles_; ++tile) {
      const int64_t next = std::min(RoundUp(rows_ * (tile + 1) / tiles_, tile_rows_), rows_);
      tile_of_[tile] = {row, static_cast<int>(RoundUp(next - row, tile_rows_))};
      row = next;
    }
  }

  // The columns of a block in one of the share's rows.
  OutputSpan SpanOf(int64_t row, const Block& block) const {
    return {batch_, row_ + row, block.first, block.count};
  }

  // The results of empty sums.
  void StoreEmpty(int64_t column, int64_t count) {
    const Block block{batch_, column, count, 0, 0, false, 0};
    std::fill_n(sums_, plan_.block.columns, 0.0);
    for (int64_t row = 0; row < rows_; ++row) {
      kernel_.epilogue.store(sums_, problem_.epilogue, SpanOf(row, block));
    }
  }

  const CanonicalDot& problem_;
  const Kernel& kernel_;
  const GemmKernel& gemm_;
  const BlockingPlan& plan_;
  int64_t batch_, row_, rows_, column_, columns_;
  int64_t tiles_;
  Tile tile_of_[kMaxTiles];
  int tile_rows_;  // of a hardware tile: even heights, and no higher than the rows
  const Round* packed_ = nullptr;
  uint8_t* packed_rows_;
  uint8_t* raw_;
  double* sums_;
  float* acc_;  // or int32_t
  float* f32_sums_;
  float* f32_factors_;
  Panel columns_panel_;
};

}  // namespace

void RunGemm(const CanonicalDot& problem, const Kernel& kernel, Pool& pool) {
  const BlockingPlan plan = MakeBlockingPlan(problem, kernel, pool.threads());
  ParallelFor(pool, plan.share.threads, plan.share.count,
              [&](int64_t share) { Share(problem, kernel, plan, share).Run(); });
}

}  // namespace jaxfp8
