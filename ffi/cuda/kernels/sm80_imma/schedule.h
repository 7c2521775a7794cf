// Which problems `sm80_imma` takes, and how a launch and its scratch memory are cut. Pure: needs no
// GPU.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_SCHEDULE_H_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_SCHEDULE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "cuda/device.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::imma {

// Why the path cannot compute a problem, with the weights on either side.
Status WhyNot(const Problem& problem, const Device& device);
// The same for a problem with the weights on the right, on any device.
Status WhyNotForm(const Problem& problem);

// The problem with the FP8 weights as its right side.
bool HasWeightsOnLeft(const Problem& problem);
Problem WithWeightsOnRight(const Problem& problem);

// Rows of an output tile in units of 16: 1 for up to 16 rows, else 4.
int RowFragmentsFor(const Problem& problem);

// From row to row of the sums, in elements.
int64_t PitchOf(const Problem& problem);

// Where things lie in the workspace: of both sides the steps of lines and the scales of their
// codes, then sums.
struct Scratch {
  size_t lhs_steps = 0, lhs_scales = 0, rhs_steps = 0, rhs_scales = 0, sums = 0;
};
Scratch ScratchOf(const Problem& problem);

// Bytes with which the whole output is one piece, those of the smallest piece, and why `workspace`
// bytes are too few for any.
size_t BestWorkspace(const Problem& problem);
size_t LeastWorkspace(const Problem& problem);
Status WhyNotWorkspace(const Problem& problem, size_t workspace);

// A part of the output whose sums are in the workspace at a time.
struct Piece {
  int64_t batch = 0, batches = 0, row = 0, rows = 0;
};

// The size of a piece: as many batch indices as fit, or, if not even one does, some of its rows.
Piece LargestPiece(const Problem& problem, size_t workspace);

// Calls `run(piece)` for the pieces of an output with values, until one fails.
template <typename Run>
Status ForEachPiece(const Problem& problem, size_t workspace, Run run) {
  const Piece most = LargestPiece(problem, workspace);
  for (int64_t b = 0; b < problem.batch; b += most.batches) {
    for (int64_t r = 0; r < problem.rows; r += most.rows) {
      JAXFP8_RETURN_IF_ERROR(run(Piece{b, std::min(most.batches, problem.batch - b), r,
                                       std::min(most.rows, problem.rows - r)}));
    }
  }
  return {};
}

// The blocks of a launch.
struct Schedule {
  int32_t row_tiles = 1, column_tiles = 1;
  int32_t depth_tiles = 0, depth_tiles_per_split = 1, splits = 1;
};

// Splits K where output tiles alone leave multiprocessors idle.
Schedule MakeSchedule(const Problem& problem, const Piece& piece, int64_t multiprocessors);

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_SCHEDULE_H_
