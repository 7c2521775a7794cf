// A kernel: a row of a table, of constants and functions.
//
// The driver (cpu/gemm.cc) knows no instruction set. The functions here know no thread and no XLA.

#pragma once

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
  kAmx = 32          // tile products of bfloat16 and of bytes, if the system allows them
};

// A block of one operand: `count` rows of A, or columns of B, by `depth` values of K.
struct Block {
  int64_t batch, first, count;
  int64_t start, depth;
  bool sums;      // whether the sum of each row or column is needed
  int64_t ahead;  // K values of the same rows or columns after the block
};

// A packed block. scale, zero and sum have one value for each row or column. A product acc over the
// block stands for
//   scale_a * scale_b * (acc - zero_a * sum_b - zero_b * sum_a + depth * zero_a * zero_b).
// Kernels of float32 accumulators subtract zero points while packing, others may do so for rows
// (`PackedFormat::subtracts_row_zeros`); then `zero` is 0.
struct Panel {
  uint8_t* data;
  int64_t pitch;  // bytes from row to row
  double* scale;
  double* zero;
  double* sum;
  uint8_t* raw;  // scratch for transposing a block
};

// The panel with its data from `bytes` on, and with the factors of later rows or columns.
JAXFP8_HD Panel DataFrom(Panel panel, int64_t bytes) {
  panel.data += bytes;
  return panel;
}
JAXFP8_HD Panel FactorsFrom(Panel panel, int64_t first) {
  panel.scale += first, panel.zero += first, panel.sum += first;
  return panel;
}

// Consecutive chunks of K for the same columns, and the packed rows of each. The scaled sums are
// stored if `first`, else added. `float32`: they may be added in float32.
struct ChunkRun {
  const Block* blocks;
  const Panel* rows;
  int64_t count;
  bool first, float32;
};
inline constexpr int64_t kMaxRunChunks = 32;

// The factors of rows or columns in float32.
struct F32Factors {
  const float *scale, *zero, *sum;
};

// A tile's destination for scaled accumulators in float32. `rows.sum` is the sum of the row less
// its zero points, as in RowFactors.
struct F32Sums {
  F32Factors rows, columns;
  float* sums;  // or null
  int64_t pitch;
  bool first;
};

// The packed rows of one register tile.
struct PackedRows {
  const uint8_t* data;
  int64_t pitch;
  int count;
};

// Part of one output row.
struct OutputSpan {
  int64_t batch, row, column, count;
};

// Rows of one pass of the GEMV kernels.
inline constexpr int kGemvRows = 4;
// The most columns of a GEMV pass over [K, N]: two pages of bytes. Longer passes read memory faster
// (1.1 to 1.2x for one row times 14336 x 4096), but their accumulators leave L1.
inline constexpr int kGemvColumns = 8192;
// Longest chunk of a GEMV: its sums stay within int32.
inline constexpr int64_t kGemvDepth = 4096;
// The most rows packed in one call. This bounds the scratch for transposing operands.
inline constexpr int64_t kPackRows = 48;

// The packed format: `group` consecutive K values of a row or column share a 32-bit lane.
struct PackedFormat {
  int group, size;  // size: the bytes of a value
  int pad;          // packed rows are zero-padded to a multiple of this many K values
  // Types shifted by 128 in packed values. A shift needs the sums of the other side.
  DType shifted_rows, shifted_columns;
  bool subtracts_row_zeros;  // for zero points within kNearZero
};

// C[M, N] by packed rows and packed micro-panels of `nr` columns.
struct GemmKernel {
  int mr, nr;          // register tile
  int tile_rows;       // rows of one hardware tile; 1 if there is none
  int64_t max_chunk;   // longest chunk: bounds the rounding of its sums, or keeps int32 exact
  int panel_depth;     // K values of a micro-panel: packed, then multiplied by all rows
  int64_t row_bytes;   // of packed rows kept together
  int64_t sums_bytes;  // of sums kept while rows are packed again

  // Around the calls of a thread, for tiles of so many rows; or null.
  void (*enter)(int tile_rows);
  void (*leave)();
  void (*pack_rows)(const Operand&, const Block&, const Panel&);
  // Loads the scales and zero points of columns and clears their sums.
  void (*load_factors)(const Operand&, const Block&, const Panel&);
  // Packs one micro-panel and multiplies it by the first tile of rows. The products are stored in
  // acc[r * pitch + c] if `first`, else added. With `f32_sums` the scaled accumulators are added
  // there instead, and acc is undefined afterwards. Adds the micro-panel to the sums of its
  // columns. With `keep`, returns the micro-panel for `multiply`.
  const uint8_t* (*pack_and_multiply)(const Operand&, const Block&, const Panel&, bool keep,
                                      const PackedRows&, void* acc, int64_t pitch, bool first,
                                      const F32Sums*);
  // Multiplies another tile of rows by the same micro-panel.
  void (*multiply)(const PackedRows&, const uint8_t* panel, int64_t depth, void* acc, int64_t pitch,
                   bool first, const F32Sums*);
  // Adds the scaled accumulators of one row to its float64 sums, or stores them if `first`.
  void (*add_scaled)(const void* acc, const Panel& rows, int row, const Panel& columns,
                     int64_t depth, int64_t width, double* sums, bool first);
};

// C[M, N] for GEMV and skinny M, by unpacked columns.
struct GemvKernel {
  int kn_rows;           // the most rows for [K, N]
  int nk_rows;           // the most rows for [N, K] with deep chunks
  int nk_short_rows;     // the most rows for [N, K] with chunks of any depth
  int nk_depth_per_row;  // chunks are deep from this mean number of K values per row on
  int nk_float32_rows;   // the most rows for [N, K] with scaled sums in float32
  int prepared_rows;     // the most rows for a prepared B
  int nk_pass_rows;      // the most rows of one call of `multiply` for [N, K]
  int pass_rows;         // the most rows of one call otherwise
  int spare_rows;        // extra rows of room in the packed rows
  // Whether the kernel adds scaled sums in float32 (ChunkRun::float32), by the layout of B.
  bool kn_float32, nk_float32;
  int64_t run_bytes;  // of packed rows kept together

  void (*pack_rows_nk)(const Operand&, const Block&, const Panel&);
  // Adds the scaled products of the rows and the columns of the run, or stores them. `columns` has
  // room for their factors, `acc` for the accumulators of whole tiles of rows. [K, N]: kGemvColumns
  // columns, with as many float32 sums behind them. [N, K]: `nr` columns for each chunk of the run.
  void (*multiply)(const Operand&, const ChunkRun&, int rows, const Panel& columns, void* acc,
                   double* sums, int64_t pitch);
};

// From sums to the output: residual, bias, activation, amax, output scale, one rounding.
struct EpilogueKernel {
  void (*store)(const double* sums, const Epilogue&, const OutputSpan&);
  // The same for one row's accumulators of the last chunk, plus `sums` unless it is null.
  void (*store_scaled)(const void* acc, const Panel& rows, int row, const Panel& columns,
                       int64_t depth, const double* sums, const Epilogue&, const OutputSpan&);
};

// The fewest rows for choosing this kernel, by the layout of B. `nk` holds only with kDepthPerRow K
// values for each row; with fewer, `kn` holds.
struct MinRows {
  int kn, nk, prepared;
};
inline constexpr int kDepthPerRow = 24;

struct Kernel {
  const char* name;
  unsigned needs;  // Feature bits
  ComputeType compute;
  MinRows min_rows;
  PackedFormat packed;
  GemmKernel gemm;
  GemvKernel gemv;
  EpilogueKernel epilogue;
};

// The kernels of one instruction set, best first.
struct KernelList {
  const Kernel* begin;
  const Kernel* end;
};

// The instruction sets with kernels, best first, each with a namespace of its own.
#ifdef JAXFP8_X86
#define JAXFP8_ISAS(V) \
  V(amx) V(avx512_vnni) V(avx512_bf16) V(avx512_vbmi) V(avx512) V(avx2) V(scalar)
#else
#define JAXFP8_ISAS(V) V(scalar)
#endif

#define JAXFP8_DECLARE(isa) \
  namespace isa {           \
  KernelList Kernels();     \
  }
JAXFP8_ISAS(JAXFP8_DECLARE)
#undef JAXFP8_DECLARE

}  // namespace jaxfp8
