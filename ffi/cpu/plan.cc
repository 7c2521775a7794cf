#include "cpu/plan.h"

#include <algorithm>

#include "cpu/features.h"
#include "cpu/scratch.h"

namespace jaxfp8 {
namespace {

// Bytes of packed columns: a quarter of an L2 of 1 MB.
constexpr int64_t kPanelBytes = 256 << 10;
// Columns packed together. With more rows, what is found for so many, and for more than
// kLeastColumns, leaves L2.
constexpr int64_t kSomeColumns = 2048;
constexpr int64_t kSomeRows = 32, kEnoughRows = 192;
// Few rows take more from such a depth on: the longer the piece of a line, the faster memory is
// read, but what is found leaves L1.
constexpr int64_t kSomeDepth = 768;
constexpr int64_t kCacheLine = 64;
// Columns of a share; with fewer, packing the rows again for each share would tell.
constexpr int64_t kLeastColumns = 256;
// To hand work to a sleeping thread, and wait for it: 10 us on a busy Xeon, up to 60 us on another
// virtual machine.
constexpr double kHandNanoseconds = 40e3;
// What the calling thread is ahead of one that has to wake: 30 us on the other machine, less on the
// Xeon, where 20 us too many cost 2 to 4 %.
constexpr double kAheadNanoseconds = 20e3;
// But no more than this part of a share.
constexpr double kMostAhead = 0.125;
// On one core with AVX-512: per product of float32, of which narrower ones take their share, and
// per value of the right side, packed ahead or by the first rows. Between what an AMD Zen 5 takes
// and a busy Xeon, three times as much.
constexpr double kMultiplyNanoseconds = 0.01;
constexpr double kPackNanoseconds = 0.1, kPackAndMultiplyNanoseconds = 0.03;
// With few rows, per value of the right side, and more for each row.
constexpr double kReadNanoseconds = 0.025, kRowNanoseconds = 0.006;
// Per output that is finished, and per batch element and block of rows.
constexpr double kFinishNanoseconds = 0.4, kShareNanoseconds = 400;
// Per output, for each chunk but the first, and where vectors are summed across their lanes for it.
constexpr double kChunkNanoseconds = 0.5, kLanesNanoseconds = 4;
constexpr int64_t kSharesPerThread = 2;
// Packed ahead, with fewer rows a strip is read too rarely to pay for its way to L2 and back.
constexpr int64_t kManyRows = 64;

// More bytes of the right side than this are taken to come from memory: an L3 may have them, but
// it is shared, and others push them out. (On a busy AMD Zen 5, one row of int8 times 4096 x 4096
// took 1.1 times as long where 24 MiB were left to the cache.)
constexpr int64_t kKeptBytes = 8 << 20;
// And more than this are more than most have.
constexpr int64_t kMostKeptBytes = 32 << 20;

double RightValues(const Problem& problem) {
  return static_cast<double>(problem.batch) * problem.columns * problem.depth;
}

double RightBytes(const Problem& problem) {
  return RightValues(problem) * SizeOf(problem.rhs.dtype);
}

// Sums that are rounded to float32 from chunk to chunk stay within the bound, K * 2^-24, if there
// are few for the depth.
constexpr int64_t kLongChunk = 96;
// For fewer there is nothing to gain.
constexpr int64_t kLeastNarrow = 3;

// Of a chunk of few rows, in the mean.
int64_t DepthOfFew(const Problem& problem) {
  return problem.depth / std::max<int64_t>(problem.segments.size(), 1);
}

bool ByTilesAlong(const Problem& problem, const Kernel& kernel) {
  return problem.rhs.depth.Contiguous() && kernel.few.tiles.Take(problem.rows, DepthOfFew(problem));
}

// Depths that are not parted. Columns along it that are multiplied as they lie are read by vectors.
int64_t Whole(const Problem& problem, const Kernel& kernel, bool few) {
  if (few && problem.rhs.depth.Contiguous()) return std::max(kernel.group, kernel.columns);
  return std::max<int64_t>(kernel.group, problem.rhs.prepared ? kQuad : 1);
}

std::vector<Chunk> CutChunks(const Problem& problem, const Kernel& kernel, bool few) {
  const int64_t longest = few ? kFewDepth : kernel.depth;
  std::vector<Chunk> chunks;
  int64_t start = 0;
  for (int64_t end : problem.segments) {
    const int64_t parts = Blocks(end - start, longest);
    const int64_t step = RoundUp(Blocks(end - start, parts), Whole(problem, kernel, few));
    for (; start < end; start += step) {
      const int64_t depth = std::min(step, end - start);
      // The odd cache line keeps rows from falling on the same sets.
      chunks.push_back({start, depth, RoundUp(depth, kernel.group) * kernel.size + 64, 0});
    }
    start = end;
  }
  return chunks;
}

// Exact sums of a chunk no longer than this are exact in float32 too, however they are shifted:
// only their products by scales and the sums of chunks are rounded, twice for each chunk.
constexpr int64_t kExactChunk = 256, kShortestExact = 2;

// Sums of values less zero points are longer, and an int32 result is to be exact.
bool IsExactOnly(const Problem& problem, int64_t longest) {
  return longest > kExactChunk || problem.lhs.zero_point || problem.rhs.zero_point ||
         problem.epilogue.out.dtype == DType::kS32;
}

// Whether multiply_few can add in float32; exact sums only where no others make them good.
bool FewCanBeNarrow(const Problem& problem, const Kernel& kernel) {
  if (ByTilesAlong(problem, kernel)) return false;
  if (kernel.sums != Sums::kInteger) return true;
  return kernel.few.narrow_along && problem.rhs.Along() &&
         problem.lhs.dtype != kernel.shifted_rows && problem.rhs.dtype != kernel.shifted_columns;
}

bool IsNarrow(const Problem& problem, const Kernel& kernel, bool few,
              const std::vector<Chunk>& all) {
  const auto chunks = static_cast<int64_t>(all.size());
  const bool exact = kernel.sums == Sums::kInteger;
  if (chunks < kLeastNarrow) return false;
  if (few && !FewCanBeNarrow(problem, kernel)) return false;
  int64_t longest = 0;
  for (const Chunk& chunk : all) longest = std::max(longest, chunk.depth);
  int64_t least = std::max(chunks * kLongChunk, longest + chunks);
  if (exact) {
    if (IsExactOnly(problem, longest)) return false;
    least = chunks * kShortestExact;
  }
  return problem.depth >= least && HasModerateScales(problem);
}

// Whether columns along the depth are multiplied as they lie. What each finds is added for every
// chunk, which short ones do not pay for, unless sums are narrow. (8 rows of float32 take longer so
// than packed columns do on a Xeon, whatever their sums.)
bool IsFewAlong(const Problem& problem, const Kernel& kernel) {
  const Few& few = kernel.few;
  const int64_t rows = problem.rows, depth = DepthOfFew(problem);
  if (rows <= few.least_along) return true;
  if (rows > few.along) return false;
  if (depth >= rows * few.depth_along) return true;
  // Rests that fill no vector are copied for each row and column.
  const bool whole = std::all_of(problem.segments.begin(), problem.segments.end() - 1,
                                 [&](int64_t end) { return end % kernel.columns == 0; });
  return few.narrow_along && depth >= rows && whole &&
         IsNarrow(problem, kernel, true, CutChunks(problem, kernel, true));
}

bool IsFew(const Problem& problem, const Kernel& kernel) {
  const Side& right = problem.rhs;
  if (!IsEightBit(right.dtype) || right.fine) return false;
  if (right.prepared) return problem.rows <= kernel.few.prepared;
  if (ByTilesAlong(problem, kernel)) return true;
  if (right.depth.Contiguous()) return IsFewAlong(problem, kernel);
  return right.free.Contiguous() && problem.rows <= kernel.few.across;
}

// Columns along the depth are read from end to end, but where several lots of rows read them, which
// they do from L2, and where sums are narrow, which are the same for any number of rows.
void CutRuns(const Problem& problem, const Kernel& kernel, Plan& plan) {
  const bool along = plan.few && problem.rhs.depth.Contiguous();
  const int64_t all = RoundUp(problem.rows, kFewRows);
  const bool by_tiles = along && ByTilesAlong(problem, kernel);
  plan.few_rows = by_tiles ? all : std::min<int64_t>(problem.rows, kernel.few.rows);
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  plan.run_chunks = along || (plan.few && plan.narrow) ? std::min(chunks, kRunChunks) : 1;
  const bool whole = problem.rows <= kernel.few.rows && !plan.narrow;
  plan.run_depth = whole ? problem.depth : kFewDepth;
}

// Where L1 is small, columns along the depth are best asked for in L2 by few rows, wherever they
// are, columns side by side in L1 if an L3 may have them. In L2, on an AMD Zen 4 with two threads,
// one row times e4m3 of 14336 x 4096 took 0.75 to 0.87 times as long as in L1, of 4096 x 4096 along
// the depth 0.92 times, side by side 1.04 times.
Ask AskFor(const Problem& problem) {
  const bool along = problem.rhs.depth.Contiguous();
  const double bytes = RightBytes(problem);
  if (HasSmallL1() && (along || bytes > kMostKeptBytes)) return Ask::kL2;
  return along || bytes > kKeptBytes ? Ask::kL1 : Ask::kNone;
}

bool IsInPlace(const Problem& problem, const Kernel& kernel, const Plan& plan) {
  if (!problem.rhs.prepared || problem.rhs.dtype != kernel.as_prepared) return false;
  return std::all_of(plan.chunks.begin(), plan.chunks.end(),
                     [&](const Chunk& chunk) { return chunk.depth % kernel.group == 0; });
}

// Sums of columns that rows need before they are narrowed are found ahead.
Packing PackingOf(const Problem& problem, const Kernel& kernel, const Plan& plan) {
  const Side& right = problem.rhs;
  if (IsInPlace(problem, kernel, plan)) return Packing::kNone;
  if (!IsEightBit(right.dtype) || right.fine) return Packing::kAhead;
  const bool exact = kernel.sums == Sums::kInteger;
  if (plan.narrow && exact && problem.lhs.dtype == kernel.shifted_rows) return Packing::kAhead;
  const bool quads = right.prepared || right.depth.Contiguous();
  if (quads) return kernel.by_first_rows.quads ? Packing::kByFirstRows : Packing::kAhead;
  const bool lines = right.free.Contiguous() && !right.depth.table;
  return lines && problem.rows <= kernel.by_first_rows.rows ? Packing::kByFirstRows
                                                            : Packing::kAhead;
}

int64_t PanelBytes(const Plan& plan, const Chunk& chunk) {
  return Scratch::Padded(plan.row_block * chunk.pitch) +
         3 * Scratch::Padded(plan.row_block * sizeof(double));
}

// Where float32 holds the sums of the chunks of a run, no round ends within it, or the bits of a
// row would depend on how many there are.
void CutRounds(const Problem& problem, const Kernel& kernel, Plan& plan) {
  const bool along = plan.few && problem.rhs.Along();
  const int64_t room = along ? kernel.room.along : kernel.room.rows;
  plan.rows_bytes = 0;
  int64_t bytes = 0;
  for (size_t i = 0, end; i < plan.chunks.size(); i = end) {
    end = plan.narrow ? plan.EndOfRun(i, plan.chunks.size()) : i + 1;
    int64_t needed = 0;
    for (size_t c = i; c < end; ++c) needed += PanelBytes(plan, plan.chunks[c]);
    if (plan.rounds.empty() || bytes + needed > room) {
      plan.rounds.push_back({i, i});
      bytes = 0;
    }
    plan.rounds.back().end = end;
    for (size_t c = i; c < end; ++c) {
      plan.chunks[c].offset = bytes;
      bytes += PanelBytes(plan, plan.chunks[c]);
    }
    plan.rows_bytes = std::max(plan.rows_bytes, bytes);
  }
}

// Columns multiplied together. With many rows, so few that what is found of them stays in L2;
// otherwise so that memory is read from end to end.
int64_t Wide(const Problem& problem, const Kernel& kernel, bool few) {
  if (problem.rows > kEnoughRows) return kLeastColumns;
  if (problem.rhs.depth.Contiguous()) return kernel.columns;
  if (problem.rhs.prepared) return kPreparedColumns;
  if (few && problem.depth >= kSomeDepth) return kFewColumns;
  return problem.rows > kSomeRows ? kSomeColumns / 2 : kSomeColumns;
}

void CutColumns(const Problem& problem, const Kernel& kernel, Plan& plan) {
  const int64_t columns = RoundUp(std::max<int64_t>(problem.columns, 1), kernel.columns);
  plan.wide = std::min(Wide(problem, kernel, plan.few), columns);
  const int64_t whole = Whole(problem, kernel, plan.few);
  const int64_t slice = kPanelBytes / (plan.wide * kernel.size) / whole * whole;
  plan.slice = std::min<int64_t>(slice, kernel.depth);
  if (plan.packing == Packing::kByFirstRows) plan.slice = kernel.by_first_rows.depth;
  plan.stretch = plan.slice;
  if (plan.packing != Packing::kAhead) return;
  // Columns along the depth are read faster by longer pieces, too.
  const bool longer = problem.rows >= kManyRows || problem.rhs.depth.Contiguous();
  plan.stretch = kernel.slice * (longer ? 4 : 1);
}

// Lines of columns side by side are cut into even pieces, a little longer than others, rather than
// leave a short rest, which is read as slowly as it is short.
void EvenColumns(const Problem& problem, const Kernel& kernel, Plan& plan) {
  if (problem.rhs.free.Contiguous() && !plan.few && problem.rows <= kEnoughRows) {
    const int64_t longest = std::max(plan.first_columns, plan.share_columns);
    const int64_t pieces = Blocks(longest, plan.wide + plan.wide / 8);
    plan.wide = RoundUp(Blocks(longest, pieces), kernel.columns);
  }
  plan.factors = std::max(plan.wide, plan.run_chunks * kernel.columns);
  // The odd cache line keeps rows from falling on the same sets.
  plan.found_pitch = plan.wide + kCacheLine / sizeof(float);
}

// Rows of several rounds are packed again for each block of columns.
int64_t ColumnBlock(const Kernel& kernel, const Plan& plan) {
  if (plan.rounds.size() <= 1) return plan.wide;
  const int64_t blocks = kernel.room.sums / (plan.row_block * plan.wide * sizeof(double));
  return plan.wide * std::max<int64_t>(blocks, 1);
}

// Of the whole problem on one core.
double Nanoseconds(const Problem& problem, const Kernel& kernel, const Plan& plan) {
  const double product = kMultiplyNanoseconds * kernel.size / sizeof(float);
  const bool ahead = plan.packing == Packing::kAhead;
  const double pack = ahead ? kPackNanoseconds : kPackAndMultiplyNanoseconds;
  const double value =
      plan.few ? kReadNanoseconds + problem.rows * kRowNanoseconds : pack + problem.rows * product;
  constexpr double kWidest = 64;  // columns of a strip with AVX-512
  const auto batch = static_cast<double>(problem.batch);
  const bool lanes = plan.few && problem.rhs.depth.Contiguous() && !plan.narrow;
  const double chunk = lanes ? kLanesNanoseconds : kChunkNanoseconds;
  const double output =
      kFinishNanoseconds + chunk * std::max<double>(plan.chunks.size(), 1) - chunk;
  return RightValues(problem) * value * kWidest / kernel.columns +
         batch * problem.rows * problem.columns * output +
         batch * plan.row_shares * kShareNanoseconds;
}

// How many of `threads` are worth their share.
int64_t WorthWhile(const Problem& problem, const Kernel& kernel, const Plan& plan,
                   int64_t threads) {
  const double alone = Nanoseconds(problem, kernel, plan);
  return alone / threads + kHandNanoseconds < alone ? threads : 1;
}

int64_t ShareColumns(const Problem& problem, const Plan& plan) {
  const int64_t threads = plan.threads;
  if (threads <= 1) return std::max<int64_t>(problem.columns, 1);
  const int64_t others = std::max<int64_t>(problem.batch * plan.row_shares, 1);
  const int64_t even = Blocks(problem.columns, Blocks(kSharesPerThread * threads, others));
  // Lines of columns side by side are best read from end to end.
  const int64_t whole = problem.rhs.depth.Contiguous() ? kLeastColumns : plan.wide;
  const int64_t fair = Blocks(problem.columns, Blocks(threads, others));
  return RoundUp(std::max({even, std::min(whole, fair), kLeastColumns}), kCacheLine);
}

// Where every thread has one share, that of the calling thread is larger.
void CutShares(const Problem& problem, const Kernel& kernel, Plan& plan) {
  plan.share_columns = ShareColumns(problem, plan);
  plan.first_columns = plan.share_columns;
  const int64_t others = plan.threads - 1;
  const int64_t shares = problem.batch * plan.row_shares;
  if (others > 0 && shares == 1 && Blocks(problem.columns, plan.share_columns) == plan.threads) {
    const double ahead = kAheadNanoseconds / Nanoseconds(problem, kernel, plan);
    const double more = problem.columns * std::min(ahead, kMostAhead / plan.threads);
    const double first = (problem.columns + others * more) / plan.threads;
    plan.first_columns = RoundUp(static_cast<int64_t>(first), kCacheLine);
    plan.share_columns = RoundUp(Blocks(problem.columns - plan.first_columns, others), kCacheLine);
  }
  const int64_t longer = plan.first_columns - plan.share_columns;
  plan.column_shares = Blocks(problem.columns - longer, plan.share_columns);
  plan.shares = shares * plan.column_shares;
}

// What multiply_few has room for, of rows that fill whole tiles.
int64_t FoundOfFew(const Problem& problem, const Kernel& kernel, const Plan& plan) {
  const int64_t rows = RoundUp(plan.few_rows, kernel.height);
  if (problem.rhs.Along()) return rows * plan.run_chunks * kernel.columns;
  return rows * kFewColumns * (plan.narrow ? 2 : 1);
}

void CountScratch(const Problem& problem, const Kernel& kernel, Plan& plan) {
  int64_t depth = 0;
  for (const Chunk& chunk : plan.chunks) depth = std::max(depth, RoundUp(chunk.depth, 16));
  const bool none = plan.few || plan.packing == Packing::kNone;
  const int64_t slice = none ? 0 : RoundUp(plan.slice, 16) * kernel.columns;
  const bool ahead = plan.packing == Packing::kAhead;
  plan.strip_pitch = ahead ? slice * kernel.size : 0;
  plan.columns_bytes = slice * kernel.size * (ahead ? plan.wide / kernel.columns : 1);
  plan.raw_bytes = 4 * std::max(slice, depth * std::min(kSlab, plan.row_block));
  const int64_t found =
      plan.few ? FoundOfFew(problem, kernel, plan) : plan.row_block * plan.found_pitch;
  plan.found_bytes = found * sizeof(float);
  const bool narrow = plan.narrow && !plan.few;
  plan.narrow_bytes = narrow ? plan.row_block * plan.narrow_pitch * sizeof(float) : 0;
  plan.sums_bytes = (plan.row_block * plan.sums_pitch + plan.column_block) * sizeof(double);
}

}  // namespace

size_t Plan::EndOfRun(size_t first, size_t end) const {
  end = std::min(end, first + run_chunks);
  int64_t depth = chunks[first].depth;
  size_t next = first + 1;
  for (; next < end; ++next) {
    depth += chunks[next].depth;
    if (depth > run_depth) break;
  }
  return next;
}

Plan MakePlan(const Problem& problem, const Kernel& kernel, int64_t threads) {
  Plan plan{};
  plan.few = IsFew(problem, kernel);
  plan.chunks = CutChunks(problem, kernel, plan.few);
  plan.narrow = IsNarrow(problem, kernel, plan.few, plan.chunks);
  // Even blocks: columns are packed again for each.
  const int64_t row_shares = std::max<int64_t>(Blocks(problem.rows, kRowBlock), 1);
  plan.row_block = std::max<int64_t>(RoundUp(Blocks(problem.rows, row_shares), kernel.rows), 1);
  plan.row_shares = Blocks(problem.rows, plan.row_block);
  if (plan.few) plan.row_block += kernel.few.spare;
  plan.ask = AskFor(problem);
  plan.packing = PackingOf(problem, kernel, plan);
  CutRuns(problem, kernel, plan);
  CutRounds(problem, kernel, plan);
  CutColumns(problem, kernel, plan);
  plan.threads = WorthWhile(problem, kernel, plan, threads);
  CutShares(problem, kernel, plan);
  EvenColumns(problem, kernel, plan);
  plan.column_block = ColumnBlock(kernel, plan);
  plan.narrow_pitch = plan.column_block + kCacheLine / sizeof(float);
  // A single chunk is finished row by row, and so is the last of narrow sums.
  const bool kept = plan.few || (plan.chunks.size() > 1 && !plan.narrow);
  plan.sums_pitch = kept ? plan.column_block : 0;
  CountScratch(problem, kernel, plan);
  return plan;
}

}  // namespace jaxfp8
