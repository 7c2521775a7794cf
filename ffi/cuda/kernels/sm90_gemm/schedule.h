// Which tile shape a product gets in `sm90_gemm`, and which block computes which tiles. Pure.
//
//   rows of the output
//     |   +------+------+------+--     Blocks, or pairs of them, take tiles in turn. A group of
//     v   |  0   |  8   |  16  |       kGroupLines rows of lhs is finished first, columns slowest,
//         |  1   |  9   |  17  |       so that the tiles of one turn form a rectangle: then both
//         | ...  | ...  | ...  |       operands are read from L2.
//         +======+======+======+==
//
// A pair is a cluster of two blocks with neighbouring tiles. The operand that both need is loaded
// once: half by each block, for both.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_SCHEDULE_H_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_SCHEDULE_H_

#include <cstdint>
#include <span>

#include "common/platform.h"
#include "cuda/kernels/common/divisor.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::sm90 {

// K of a stage, in elements and bytes; also that of a block of scales.
inline constexpr int kStepDepth = 128;

// Rows and columns of an output tile.
struct TileShape {
  int32_t rows = 0, columns = 0;
  JAXFP8_HD constexpr bool operator==(const TileShape& o) const {
    return rows == o.rows && columns == o.columns;
  }
};

// The neighbouring tiles of a pair of blocks share columns of the output, and so rhs, or rows, and
// so lhs.
enum class Pair : uint8_t { kNone, kSharesRhs, kSharesLhs };

struct Configuration {
  TileShape tile;
  Pair pair = Pair::kNone;
};

// The tiles of a launch. A unit is a tile, or the two tiles of a pair.
struct Schedule {
  int32_t units = 0, row_units = 0, column_units = 0;  // `units` of all batch indices
  int32_t group_rows = 1;                              // units of a group
  int32_t steps = 0;                                   // along K
  Pair pair = Pair::kNone;
  Divisor units_per_batch, units_per_group;
  Divisor rows_of_group, rows_of_last_group;
};

// A tile, by tiles along each axis.
struct TileCoord {
  int32_t batch, row, column;
};

// The tile of a block in a unit. `rank` is that of the block in its pair.
JAXFP8_HD TileCoord TileOf(const Schedule& s, int32_t unit, int32_t rank) {
  const int32_t batch = s.units_per_batch.Quotient(unit);
  const int32_t in_batch = unit - batch * s.row_units * s.column_units;
  const int32_t group = s.units_per_group.Quotient(in_batch);
  const int32_t first = group * s.group_rows;
  const int32_t in_group = in_batch - first * s.column_units;
  const bool is_last = first + s.group_rows > s.row_units;
  const int32_t rows = is_last ? s.row_units - first : s.group_rows;
  const int32_t column = (is_last ? s.rows_of_last_group : s.rows_of_group).Quotient(in_group);
  const int32_t row = first + in_group - column * rows;
  return {batch, s.pair == Pair::kSharesRhs ? 2 * row + rank : row,
          s.pair == Pair::kSharesLhs ? 2 * column + rank : column};
}

// The tile shapes that kernels are compiled for, of FP8 and of int8. That has one set of sums in
// registers, and FP8 two: the scaled ones, and those of a step.
inline constexpr TileShape kTileShapes[] = {{256, 128}, {128, 192}, {128, 128},
                                            {64, 128},  {64, 64},   {64, 32}};
inline constexpr TileShape kInt8TileShapes[] = {{128, 256}, {256, 128}, {128, 128},
                                                {64, 128},  {64, 64},   {64, 32}};

std::span<const TileShape> TileShapesOf(const Problem& problem);

Schedule MakeSchedule(const Problem& problem, const Configuration& configuration);

// How many blocks a launch has: a multiple of the blocks of a unit, at most one a multiprocessor.
int32_t BlocksOf(const Schedule& schedule, int32_t multiprocessors);

// The configuration with the shortest estimated time.
Configuration Choose(const Problem& problem, int32_t multiprocessors);

// Estimated clock cycles.
double CyclesOf(const Problem& problem, const Configuration& configuration,
                int32_t multiprocessors);

}  // namespace jaxfp8::cuda::sm90

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_SCHEDULE_H_
