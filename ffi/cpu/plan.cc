#include "cpu/plan.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace jaxfp8 {
namespace {

constexpr int64_t kCacheLine = 64;

// Columns of a pass. Memory is faster if a longer part of a line is read at once; but the
// accumulators of a pass stay in kAccumulatorBytes of L2.
constexpr int64_t kLongPass = 2048, kShortPass = 256;
constexpr int64_t kAccumulatorBytes = 256 << 10;
constexpr int64_t kShortPassRows = 192;
// A GEMV reads lines longer, if K is large enough to pay for accumulators outside L1.
constexpr int64_t kGemvLongDepth = 768;
// The fewest columns of a share: the rows are packed again for each share.
constexpr int64_t kShareColumns = 256;
constexpr int64_t kSharesPerThread = 2;

// An estimate of time on one core with AVX-512, between an AMD Zen 5 and a busy Xeon. The first is
// per product of float32; narrower types take their share of it. The others are per value of B:
// multiplied by many rows, by few, and then for each row.
constexpr double kMultiplyNanoseconds = 0.01, kPackNanoseconds = 0.03;
constexpr double kReadNanoseconds = 0.025, kRowNanoseconds = 0.006;
// Per output, for its epilogue and for each further chunk; per batch element and block of rows.
constexpr double kFinishNanoseconds = 0.4, kChunkNanoseconds = 0.5, kShareNanoseconds = 400;
// To hand work to a sleeping thread and wait for it: 10 to 60 us.
constexpr double kHandNanoseconds = 40e3;

// The fewest chunks for float32 sums of scaled products. The sum is rounded once for each chunk.
constexpr int64_t kF32Chunks = 3;
// Float32 accumulators keep the bound, K * 2^-24, if chunks have this much of K in the mean.
constexpr int64_t kF32ChunkDepth = 32;
// float32 holds the exact sums of a chunk no longer than this, shifted or not. Chunks of at least
// kF32ExactLeastDepth keep the bound.
constexpr int64_t kF32ExactDepth = 256, kF32ExactLeastDepth = 2;

bool IsExact(const Kernel& kernel) { return kernel.compute == ComputeType::kInt32; }

// The mean depth of a GEMV's chunks.
int64_t MeanDepth(const CanonicalDot& problem) {
  return problem.depth / std::max<int64_t>(problem.segments.size(), 1);
}

// Lane sums of [N, K] are added up for each row, and unless scaled sums are `float32` for each
// chunk. Short chunks do not pay for this.
bool IsGemv(const CanonicalDot& problem, const Kernel& kernel, bool float32) {
  const Operand& right = problem.rhs;
  const GemvKernel& gemv = kernel.gemv;
  const int64_t rows = problem.rows;
  if (!IsEightBit(right.dtype) || right.fine) return false;
  if (right.prepared) return rows <= gemv.prepared_rows;
  if (!right.depth.Contiguous()) return right.free.Contiguous() && rows <= gemv.kn_rows;
  if (rows <= gemv.nk_short_rows) return true;
  if (float32 && rows <= gemv.nk_float32_rows && MeanDepth(problem) >= kF32ChunkDepth) return true;
  return rows <= gemv.nk_rows && MeanDepth(problem) >= rows * gemv.nk_depth_per_row;
}

// Chunks are multiples of this many K values, except the last of a segment.
int64_t ChunkUnit(const CanonicalDot& problem, const Kernel& kernel, bool gemv) {
  if (gemv && problem.rhs.depth.Contiguous()) return std::max(kernel.packed.pad, kernel.gemm.nr);
  return std::max<int64_t>(kernel.packed.pad, problem.rhs.prepared ? kQuad : 1);
}

std::vector<Chunk> CutChunks(const CanonicalDot& problem, const Kernel& kernel, bool gemv) {
  const int64_t longest = gemv ? kGemvDepth : kernel.gemm.max_chunk;
  std::vector<Chunk> chunks;
  int64_t start = 0;
  for (int64_t end : problem.segments) {
    const int64_t parts = DivideUp(end - start, longest);
    const int64_t step = RoundUp(DivideUp(end - start, parts), ChunkUnit(problem, kernel, gemv));
    for (; start < end; start += step) {
      const int64_t depth = std::min(step, end - start);
      // The odd cache line keeps rows from falling on the same sets.
      const int64_t pitch = RoundUp(depth, kernel.packed.pad) * kernel.packed.size + kCacheLine;
      chunks.push_back({start, depth, pitch, 0});
    }
    start = end;
  }
  return chunks;
}

// Sums of values less zero points are longer, and an int32 result must be exact. Unsigned rows need
// the sums of columns, known only after a chunk is packed.
bool HoldsExactSums(const CanonicalDot& problem, const Kernel& kernel, int64_t longest) {
  return longest <= kF32ExactDepth && !problem.lhs.zero_point && !problem.rhs.zero_point &&
         problem.epilogue.out.dtype != DType::kS32 &&
         problem.lhs.dtype != kernel.packed.shifted_rows;
}

bool GemvAddsInFloat32(const CanonicalDot& problem, const Kernel& kernel) {
  if (!problem.rhs.Along()) return kernel.gemv.kn_float32;
  return kernel.gemv.nk_float32 && problem.rhs.dtype != kernel.packed.shifted_columns;
}

bool AddsInFloat32(const CanonicalDot& problem, const Kernel& kernel, const BlockingPlan& plan) {
  const auto chunks = static_cast<int64_t>(plan.depth.chunks.size());
  if (chunks < kF32Chunks) return false;
  if (plan.gemv && !GemvAddsInFloat32(problem, kernel)) return false;
  int64_t longest = 0;
  for (const Chunk& chunk : plan.depth.chunks) longest = std::max(longest, chunk.depth);
  int64_t least = std::max(chunks * kF32ChunkDepth, longest + chunks);
  if (IsExact(kernel)) {
    if (!HoldsExactSums(problem, kernel, longest)) return false;
    least = chunks * kF32ExactLeastDepth;
  }
  return problem.depth >= least && HasModerateScales(problem);
}

// As a GEMV with float32 sums if they may be, else as whatever suits sums of float64.
void PlanDepth(const CanonicalDot& problem, const Kernel& kernel, BlockingPlan& plan) {
  const auto cut = [&](bool gemv) {
    plan.gemv = gemv;
    plan.depth.chunks = CutChunks(problem, kernel, gemv);
    plan.depth.float32 = AddsInFloat32(problem, kernel, plan);
  };
  cut(IsGemv(problem, kernel, true));
  if (plan.gemv && !plan.depth.float32 && !IsGemv(problem, kernel, false)) cut(false);
}

int64_t PackedRowsBytes(const BlockingPlan& plan, const Chunk& chunk) {
  return Scratch::Padded(plan.block.rows * chunk.pitch) +
         3 * Scratch::Padded(plan.block.rows * sizeof(double));
}

// A GEMV takes many chunks in one call if columns are read from end to end ([N, K]), or sums are
// float32. Then no round ends within a run: the bits of a row would depend on the others.
void CutRounds(const CanonicalDot& problem, const Kernel& kernel, BlockingPlan& plan) {
  DepthPlan& depth = plan.depth;
  const bool nk = plan.gemv && problem.rhs.Along();
  const auto count = static_cast<int64_t>(depth.chunks.size());
  const bool runs = nk || (plan.gemv && depth.float32);
  depth.run_chunks = runs ? std::clamp<int64_t>(count, 1, kMaxRunChunks) : 1;
  depth.run_depth = depth.float32 ? kGemvDepth : problem.depth;
  const int64_t room = nk ? kernel.gemv.run_bytes : kernel.gemm.row_bytes;
  int64_t bytes = 0;
  for (size_t i = 0, end; i < depth.chunks.size(); i = end) {
    end = depth.float32 ? depth.EndOfRun(i, depth.chunks.size()) : i + 1;
    int64_t needed = 0;
    for (size_t c = i; c < end; ++c) needed += PackedRowsBytes(plan, depth.chunks[c]);
    if (depth.rounds.empty() || bytes + needed > room) {
      depth.rounds.push_back({i, i});
      bytes = 0;
    }
    depth.rounds.back().end = end;
    for (size_t c = i; c < end; ++c) {
      depth.chunks[c].offset = bytes;
      bytes += PackedRowsBytes(plan, depth.chunks[c]);
    }
    plan.scratch.rows = std::max(plan.scratch.rows, bytes);
  }
}

// Even blocks: columns are packed again for each.
void CutRows(const CanonicalDot& problem, const Kernel& kernel, BlockingPlan& plan) {
  const int64_t blocks = std::max<int64_t>(DivideUp(problem.rows, kRowBlock), 1);
  plan.block.rows = std::max<int64_t>(RoundUp(DivideUp(problem.rows, blocks), kernel.gemm.mr), 1);
  plan.share.rows = plan.block.rows;
  plan.share.down = DivideUp(problem.rows, plan.share.rows);
  if (plan.gemv) plan.block.rows += kernel.gemv.spare_rows;
  const GemvKernel& gemv = kernel.gemv;
  plan.block.gemv_rows =
      std::min<int64_t>(problem.rows, problem.rhs.Along() ? gemv.nk_pass_rows : gemv.pass_rows);
}

int64_t PassColumns(const CanonicalDot& problem, const Kernel& kernel, bool gemv) {
  if (problem.rows > kShortPassRows) return kShortPass;
  if (problem.rhs.depth.Contiguous()) return kernel.gemm.nr;
  if (problem.rhs.prepared) return kPreparedColumns;
  if (gemv) return problem.depth >= kGemvLongDepth ? kGemvColumns : kLongPass;
  const int64_t fitting = kAccumulatorBytes / static_cast<int64_t>(sizeof(float)) / problem.rows;
  return std::min(kLongPass, RoundUp(fitting, kernel.gemm.nr));
}

// The time of the whole problem on one core.
double Nanoseconds(const CanonicalDot& problem, const Kernel& kernel, const BlockingPlan& plan) {
  const double product = kMultiplyNanoseconds * kernel.packed.size / sizeof(float);
  const auto rows = static_cast<double>(problem.rows);
  const auto batch = static_cast<double>(problem.batch);
  const double value =
      plan.gemv ? kReadNanoseconds + rows * kRowNanoseconds : kPackNanoseconds + rows * product;
  constexpr double kWidest = 64;  // columns of a micro-panel with AVX-512
  const double chunks = std::max<double>(plan.depth.chunks.size(), 1);
  const double output = kFinishNanoseconds + kChunkNanoseconds * (chunks - 1);
  return batch * problem.columns * problem.depth * value * kWidest / kernel.gemm.nr +
         batch * rows * problem.columns * output + batch * plan.share.down * kShareNanoseconds;
}

// All threads, if they save more time than handing them work takes.
void CutShares(const CanonicalDot& problem, const Kernel& kernel, int64_t threads,
               BlockingPlan& plan) {
  SharePlan& share = plan.share;
  const double alone = Nanoseconds(problem, kernel, plan);
  share.threads = alone / threads + kHandNanoseconds < alone ? threads : 1;
  share.columns = std::max<int64_t>(problem.columns, 1);
  if (share.threads > 1) {
    const int64_t others = std::max<int64_t>(problem.batch * share.down, 1);
    const int64_t even =
        DivideUp(problem.columns, DivideUp(kSharesPerThread * share.threads, others));
    const int64_t fair = DivideUp(problem.columns, DivideUp(share.threads, others));
    // Lines of [K, N] are best read from end to end.
    const int64_t whole = problem.rhs.depth.Contiguous() ? kShareColumns : plan.block.pass;
    share.columns = RoundUp(std::max({even, std::min(whole, fair), kShareColumns}), kCacheLine);
  }
  share.across = DivideUp(problem.columns, share.columns);
  share.count = problem.batch * share.down * share.across;
}

void CutColumns(const CanonicalDot& problem, const Kernel& kernel, int64_t threads,
                BlockingPlan& plan) {
  BlockPlan& block = plan.block;
  const int64_t nr = kernel.gemm.nr;
  block.pass = std::min(PassColumns(problem, kernel, plan.gemv),
                        RoundUp(std::max<int64_t>(problem.columns, 1), nr));
  CutShares(problem, kernel, threads, plan);
  // Even passes over [K, N]: a short rest of a line would be read slowly.
  if (problem.rhs.free.Contiguous() && !plan.gemv && problem.rows <= kShortPassRows) {
    const int64_t passes = DivideUp(plan.share.columns, block.pass + block.pass / 8);
    block.pass = RoundUp(DivideUp(plan.share.columns, passes), nr);
  }
  // Rows of several rounds are packed again for each block of columns.
  block.columns = block.pass;
  if (plan.depth.rounds.size() <= 1) return;
  const int64_t passes =
      kernel.gemm.sums_bytes / static_cast<int64_t>(block.rows * block.pass * sizeof(double));
  block.columns *= std::max<int64_t>(passes, 1);
}

// Accumulators of a GEMV, for whole tiles of rows. Float32 sums of [K, N] lie behind them.
int64_t GemvAccs(const CanonicalDot& problem, const Kernel& kernel, const BlockingPlan& plan) {
  const int64_t rows = RoundUp(plan.block.gemv_rows, kernel.gemm.tile_rows);
  if (problem.rhs.Along()) return rows * plan.depth.run_chunks * kernel.gemm.nr;
  return rows * kGemvColumns * (plan.depth.float32 ? 2 : 1);
}

void SizeScratch(const CanonicalDot& problem, const Kernel& kernel, BlockingPlan& plan) {
  ScratchPlan& scratch = plan.scratch;
  const BlockPlan& block = plan.block;
  const int64_t nr = kernel.gemm.nr;
  int64_t depth = 0;
  for (const Chunk& chunk : plan.depth.chunks) depth = std::max(depth, RoundUp(chunk.depth, 16));
  const int64_t panel = plan.gemv ? 0 : RoundUp(kernel.gemm.panel_depth, 16) * nr;
  scratch.factors = std::max(block.pass, plan.depth.run_chunks * nr);
  scratch.columns = panel * kernel.packed.size;
  scratch.raw = 4 * std::max(panel, depth * std::min(kPackRows, block.rows));
  scratch.acc_pitch = block.pass + kCacheLine / sizeof(float);
  const int64_t accs = plan.gemv ? GemvAccs(problem, kernel, plan) : block.rows * scratch.acc_pitch;
  scratch.acc = accs * sizeof(float);
  // Rows of a single chunk are finished one by one. Rows of float32 sums are, too.
  const bool float32 = plan.depth.float32 && !plan.gemv;
  scratch.f32_pitch = block.columns + kCacheLine / sizeof(float);
  scratch.f32_sums = float32 ? block.rows * scratch.f32_pitch * sizeof(float) : 0;
  scratch.sums_pitch = plan.gemv || (plan.depth.chunks.size() > 1 && !float32) ? block.columns : 0;
  scratch.sums = (block.rows * scratch.sums_pitch + block.columns) * sizeof(double);
}

}  // namespace

size_t DepthPlan::EndOfRun(size_t first, size_t end) const {
  end = std::min(end, first + run_chunks);
  int64_t depth = chunks[first].depth;
  size_t next = first + 1;
  for (; next < end; ++next) {
    depth += chunks[next].depth;
    if (depth > run_depth) break;
  }
  return next;
}

BlockingPlan MakeBlockingPlan(const CanonicalDot& problem, const Kernel& kernel, int64_t threads) {
  BlockingPlan plan{};
  PlanDepth(problem, kernel, plan);
  CutRows(problem, kernel, plan);
  CutRounds(problem, kernel, plan);
  CutColumns(problem, kernel, threads, plan);
  SizeScratch(problem, kernel, plan);
  return plan;
}

}  // namespace jaxfp8
