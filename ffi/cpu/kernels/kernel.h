// What a kernel is: a row of a table. The driver (cpu/gemm.cc) knows no instruction set, the
// functions here know no thread and no XLA.

#ifndef JAXFP8_CPU_KERNELS_KERNEL_H_
#define JAXFP8_CPU_KERNELS_KERNEL_H_

#include <cstdint>

#include "cpu/problem.h"

namespace jaxfp8 {

// Instruction sets beyond the portable one, as bits.
enum Feature : unsigned {
  kAvx2 = 1,         // with FMA and F16C
  kAvx512 = 2,       // F, BW, DQ, VL
  kAvx512Vbmi = 4,   // byte permutations
  kAvx512Vnni = 8,   // 8-bit dot products
  kAvx512Bf16 = 16,  // bfloat16 dot products
  kAmx = 32          // products of tiles, of bfloat16 and of bytes; and the system lets us
};

// Into which cache what is read next is asked for: into none, where the processor fetches it faster
// by itself, into L1, or from further ahead into L2: in this order.
enum class Ask : uint8_t { kNone, kL1, kL2 };

// A piece of one side: `count` lines (rows or columns) by `depth` values.
struct Block {
  int64_t batch, first, count;
  int64_t start, depth;
  bool sums;      // whether the sum of each line is wanted
  int64_t ahead;  // depth of the same lines that is read after it
  Ask ask;        // for columns
};

// A packed block. The factors are per line: a sum over the block is worth
// scale_l * scale_r * (sum - zero_l * sum_r - zero_r * sum_l + depth * zero_l * zero_r),
// where zero points may have been subtracted beforehand: by the float kernels always, and from rows
// by those with `rows_less_zero`, which leave 0.
struct Panel {
  uint8_t* data;
  int64_t pitch;  // bytes from row to row, or from strip to strip, in which columns are
                  // interleaved; 0 where strips take each other's place
  double* scale;
  double* zero;
  double* sum;
  uint8_t* raw;  // room for an unpacked block whose layout needs turning
};

// Chunks of the depth of the same columns, one after the other, and packed rows for each; `first`
// if no sums are there yet. `narrow` if float32 may hold the sums of their worth, which exact sums
// do without unless Few::narrow_along. One chunk only, unless columns lie along the depth and are
// no more than a strip, or sums are narrow.
struct ChunkRun {
  const Block* blocks;
  const Panel* left;
  int64_t count;
  bool first, narrow;
};

// The factors of some lines in float32.
struct NarrowFactors {
  const float *scale, *zero, *sum;
};

// Where the worth of a tile's products is added in float32. `rows.sum` is of rows less their zero
// points, as in RowFactors.
struct NarrowSums {
  NarrowFactors rows, columns;
  float* sums;  // or none
  int64_t pitch;
  bool first;
};

// Packed rows that are multiplied in one go.
struct RowsOfTile {
  const uint8_t* data;
  int64_t pitch;
  int count;
};

// Lines across the depth, of the columns that are packed next: how many of them are still to be
// asked for, and a byte of the first.
struct UpcomingLines {
  const uint8_t* at;
  int64_t step, count;
};

// A stretch of one output row.
struct Stretch {
  int64_t batch, row, column, count;
};

inline constexpr int64_t kRunChunks = 32;  // at most

inline constexpr int kFewRows = 4;
// Depth of a chunk that pays for a row that is multiplied by columns along it in tiles, as they
// lie: lanes are summed for each.
inline constexpr int kDepthOfRow = 26;
// Columns multiplied with few rows in one go, at most.
inline constexpr int kFewColumns = 8192;
// Columns that are not packed fill no cache: their chunks are long, and sums still fit int32.
inline constexpr int64_t kFewDepth = 4096;
// Rows are packed so many at a time: bounds the scratch of a layout that has to be turned.
inline constexpr int64_t kSlab = 48;

// Bytes that may be filled with packed rows, which L3 delivers as they are needed, or L2 where few
// are read again and again along the depth; and with the sums of the columns that are multiplied
// before rows are packed again.
struct Room {
  int64_t rows, along, sums;
};

// How many rows are multiplied in one go by tiles of columns along the depth, and the least depth
// of a chunk that pays for it, beside kDepthOfRow for each row.
struct TilesOfFew {
  int least, most, depth;

  bool Take(int64_t rows, int64_t depth_of_chunk) const {
    return rows >= least && rows <= most && depth_of_chunk >= depth &&
           depth_of_chunk >= kDepthOfRow * rows;
  }
};

struct Few {
  int rows;                     // that multiply_few takes in one go, unless `tiles` does
  int across, along, prepared;  // rows up to which it is best, by how columns lie
  // Along the depth it is for so many rows; for more with so much of a chunk for each.
  int least_along, depth_along;
  // Whether more rows pay, too, for chunks as deep as there are rows, where float32 holds the sums
  // of them; and whether it may hold exact ones.
  bool narrow_along;
  int spare;  // rows that their panels have room for beside them
  TilesOfFew tiles;
};

// How the first rows pack the columns for those that follow (pack_and_multiply): how much of the
// depth of a strip, up to how many rows those side by side, and whether those along the depth and
// prepared ones, too. Others are packed ahead.
struct ByFirstRows {
  int depth, rows;
  bool quads;
};

// Rows with fewer of which another kernel that can is better, by how columns lie; those along the
// depth where it pays for that (kDepthOfRow).
struct Least {
  int across, along, prepared;
};

struct Kernel {
  const char* name;
  unsigned needs;  // Feature bits
  Sums sums;
  int rows, columns;  // of the register tile; so many columns are a strip
  int height;         // most rows of a tile of the processor's, if any; `multiply` takes whole ones
  int depth;          // longest chunk, whose sums stay in 32 bits
  int slice;          // depth at which a packed strip fills half of an L1, or two thirds
  int group;          // depth that panels are padded to, with values whose products are 0
  int size;           // bytes of a packed value
  Room room;
  DType as_prepared;  // whose prepared columns are multiplied as they lie; or none
  Few few;
  Least least;
  ByFirstRows by_first_rows;
  // Types whose packed values are shifted, so that the sums of the other side are needed; or none.
  DType shifted_rows, shifted_columns;
  bool rows_less_zero;  // whether rows are packed less zero points that are near

  // Before and after a thread calls `multiply`, whose tiles have `height` rows; or none.
  void (*enter)(int height);
  void (*leave)();
  void (*pack_rows)(const Side&, const Block&, const Panel&);
  // The same for few rows that columns along the depth are multiplied with, all of them, of which
  // it packs at most kSlab in one go; the panel has room for few.spare more.
  void (*pack_rows_along)(const Side&, const Block&, const Panel&);
  // The factors of as many columns as are packed in one go, and sums of 0.
  void (*start_columns)(const Side&, const Block&, const Panel&);
  // Packs a slice of columns, its strips a pitch apart, and adds to the sums of the columns.
  void (*pack_columns)(const Side&, const Block&, const Panel&);
  // Adds to the sums of a slice of prepared columns of `as_prepared`, which need no packing.
  void (*sum_columns)(const Side&, const Block&, const Panel&);
  // found[r * pitch + c] += the product of packed rows, at most Kernel::rows of them, and a strip,
  // or = where it is the first; what is found is float or int32_t. With `narrow` its worth is added
  // there instead, and what is found is lost. Asks for some of the next lines.
  void (*multiply)(const RowsOfTile&, const uint8_t* strip, int64_t depth, void* found,
                   int64_t pitch, bool first, const NarrowSums* narrow, UpcomingLines&);
  // The same for a strip of prepared columns of `as_prepared`; or none.
  void (*multiply_in_place)(const RowsOfTile&, const uint8_t* strip, int64_t depth, void* found,
                            int64_t pitch, bool first, const NarrowSums* narrow, UpcomingLines&);
  // The same for a slice of a strip of 8-bit values, as `by_first_rows` says, which it packs
  // meanwhile for so many tiles of rows that follow, and to whom it may leave the next lines; adds
  // to the sums of the columns.
  void (*pack_and_multiply)(const Side&, const Block& strip, const Panel&, int64_t follow,
                            const RowsOfTile&, void* found, int64_t pitch, bool first,
                            const NarrowSums* narrow, UpcomingLines&);
  // Adds the worth of what was found along a chunk to `width` sums of one row, or stores it where
  // the chunk is the first.
  void (*add)(const void* found, const Panel& left, int row, const Panel& right, int64_t depth,
              int64_t width, double* sums, bool first);
  // Adds the worth of the products of at most few.rows rows (few.tiles.most where these take them)
  // and the columns of a run, of 8-bit values, contiguous along the depth, side by side or
  // prepared, which are not packed ahead; `right` has room for their factors, along the depth of
  // each chunk a strip further. `found` has room for what is found of all rows, up to whole tiles:
  // along the depth of the chunks of a run and a strip, of others of kFewColumns columns, twice
  // where sums are narrow. `left` has room for few.spare more rows.
  void (*multiply_few)(const Side&, const ChunkRun&, int rows, const Panel& right, void* found,
                       double* sums, int64_t pitch);
  // Finishes sums and stores the results; there are sums for whole strips.
  void (*finish)(const double* sums, const Epilogue&, const Stretch&);
  // The same for the worth of what was found of one packed row along the last chunk, and of the
  // sums of those before it, or none.
  void (*finish_found)(const void* found, const Panel& left, int row, const Panel& right,
                       int64_t depth, const double* sums, const Epilogue&, const Stretch&);
};

// The kernels of one instruction set, best first.
struct KernelList {
  const Kernel* begin;
  const Kernel* end;
};

namespace scalar {
KernelList Kernels();
}
#ifdef JAXFP8_X86
namespace avx2 {
KernelList Kernels();
}
namespace avx512 {
KernelList Kernels();
}
namespace avx512_bf16 {
KernelList Kernels();
}
namespace avx512_vnni {
KernelList Kernels();
}
namespace avx512_vbmi {
KernelList Kernels();
}
namespace amx {
KernelList Kernels();
}
#endif

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_KERNELS_KERNEL_H_
