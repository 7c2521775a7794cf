// The cuts of a problem: K into chunks and rounds, M and N into blocks, the output into shares.
//
//             N: columns                      share: the work of one thread at a time
//        +---------+---------+                block of rows:  packed once for a round
//     M  | share 0 | share 1 |                pass:           columns multiplied by all its rows
//        +---------+---------+                                before the next ones
//        | share 2 | share 3 |                chunk of K:     sums stay in 32 bits, scales and zero
//        +---------+---------+                                points are constant
//                                             round:          chunks whose packed rows stay in
//                                             cache run:            chunks of one call of a GEMV
//
// Cuts of K depend on the problem and the kernel only: a result has the same bits on any number of
// threads.

#pragma once

#include <cstdint>
#include <vector>

#include "common/sizes.h"
#include "cpu/kernels/kernel.h"
#include "cpu/problem.h"

namespace jaxfp8 {

struct Chunk {
  int64_t start, depth;
  int64_t pitch;   // bytes of a packed row
  int64_t offset;  // of its packed rows within the round's
};

// Chunks [begin, end).
struct Round {
  size_t begin, end;
};

struct DepthPlan {
  std::vector<Chunk> chunks;
  std::vector<Round> rounds;
  int64_t run_chunks;  // most chunks and
  int64_t run_depth;   // most K values of a run
  bool float32;        // whether scaled sums are added in float32 up to the last chunk

  // The end of the run of chunks from `first` on, at most `end`.
  size_t EndOfRun(size_t first, size_t end) const;
};

struct BlockPlan {
  int64_t rows;       // with packed values kept at once
  int64_t gemv_rows;  // of one call of a GEMV
  int64_t pass;       // columns of a pass
  int64_t columns;    // with sums kept at once
};

// Each batch element has `down` x `across` shares.
struct SharePlan {
  int64_t threads;
  int64_t rows, columns;  // of a share
  int64_t down, across, count;
};

// Sizes of scratch: pitches in elements, sizes in bytes.
struct ScratchPlan {
  int64_t factors;                           // columns with factors kept
  int64_t acc_pitch, f32_pitch, sums_pitch;  // row strides; 0 if only one row is kept
  int64_t rows, columns, raw, acc, f32_sums, sums;
};

struct BlockingPlan {
  bool gemv;  // whether columns are not packed
  DepthPlan depth;
  BlockPlan block;
  SharePlan share;
  ScratchPlan scratch;
};

// The most rows packed together: a multiple of every kernel's tile. The lowest tile has 3 rows.
inline constexpr int64_t kRowBlock = 288, kMaxTiles = kRowBlock / 3;

BlockingPlan MakeBlockingPlan(const CanonicalDot& problem, const Kernel& kernel, int64_t threads);

}  // namespace jaxfp8
