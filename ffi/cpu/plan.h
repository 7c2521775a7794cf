// How a problem is cut: chunks of depth, rounds of chunks, blocks of rows and columns, shares of
// work.
//
// The cuts along the depth depend on the problem and the kernel only, so that a result has the same
// bits on any number of threads.

#ifndef JAXFP8_CPU_PLAN_H_
#define JAXFP8_CPU_PLAN_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels/kernel.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// A stretch of depth that is packed and multiplied in one go.
struct Chunk {
  int64_t start, depth;
  int64_t pitch;   // bytes of a packed row
  int64_t offset;  // of its packed rows within those of the round
};

// Chunks, [begin, end), whose packed rows stay in the cache together.
struct Round {
  size_t begin, end;
};

// When columns are packed: not at all, prepared ones that are multiplied as they lie; a slice of
// many strips, and then all of it multiplied; a stretch of a strip by the first rows that it is
// multiplied with.
enum class Packing : uint8_t { kNone, kAhead, kByFirstRows };

struct Plan {
  std::vector<Chunk> chunks;
  std::vector<Round> rounds;
  bool few;               // whether columns are multiplied as they are, by Kernel::multiply_few
  int64_t few_rows;       // with few rows, most that are multiplied in one go,
  int64_t run_chunks;     // most chunks and
  int64_t run_depth;      // depth that columns are multiplied for in one go
  Ask ask;                // for columns
  Packing packing;        // of columns, unless there are few rows
  int64_t row_block;      // rows whose packed values are kept at once
  int64_t wide;           // columns multiplied with the rows of a chunk in one go
  int64_t factors;        // columns whose factors are kept at once
  int64_t found_pitch;    // from what is found of a row to the next
  int64_t slice;          // depth of columns packed in one go
  int64_t stretch;        // depth of a strip multiplied in one go
  int64_t strip_pitch;    // bytes from a packed strip to the next; 0 where they lie in one place
  int64_t column_block;   // columns whose sums are kept at once
  bool narrow;            // whether sums are float32 up to the last chunk
  int64_t narrow_pitch;   // from those of a row to the next
  int64_t sums_pitch;     // from the sums of a row to the next; 0 where a row needs them no longer
  int64_t threads;        // that share the work
  int64_t first_columns;  // columns of the first share of it
  int64_t share_columns;  // of every other
  int64_t row_shares, column_shares, shares;

  // Bytes of scratch.
  int64_t rows_bytes, columns_bytes, raw_bytes, found_bytes, narrow_bytes, sums_bytes;

  // Where the run of chunks ends, of those before `end`, that begins with the first.
  size_t EndOfRun(size_t first, size_t end) const;
};

inline int64_t Blocks(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
inline int64_t RoundUp(int64_t value, int64_t unit) { return Blocks(value, unit) * unit; }

// Rows packed together, at most: a multiple of every kernel's tile, whose least height is 3.
inline constexpr int64_t kRowBlock = 288, kMostTiles = kRowBlock / 3;

Plan MakePlan(const Problem& problem, const Kernel& kernel, int64_t threads);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_PLAN_H_
