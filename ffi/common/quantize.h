// The problem of quantizing wide floats to 8 bits with a computed or given scale per tile.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "common/sizes.h"
#include "common/status.h"

namespace jaxfp8 {

// x is [rows, columns], row-major and dense; a batch is folded into the rows. Scale and amax are
// [ceil(rows / tile_rows), ceil(columns / tile_columns)], float32, row-major.
struct QuantizeProblem {
  int64_t rows = 0, columns = 0;
  int64_t tile_rows = 1, tile_columns = 1;
  DType in = DType::kNone;   // bfloat16, float16, float32; FP8 on a GPU
  DType out = DType::kNone;  // float8_e4m3fn, float8_e5m2, int8
  bool given_scale = false;  // the scale is an input; 0 counts as 1
  bool transposed = false;   // the codes also as [columns, rows]
  // The transposed codes have computed scales of their own, for tiles of the transposed matrix; a
  // GPU only.
  bool transposed_scale = false;
  bool amax = false;          // the largest finite |x| of each tile is a result
  bool power_of_two = false;  // a computed scale is rounded up to a power of two
  bool plain = false;         // a scale of 0 divides like any other number; CPU only
  bool multiplies = false;    // codes are of x * scale, not of x / scale; plain only
  int64_t lowest = -128;      // of int8 codes; CPU only

  int64_t tiles_down() const { return rows / tile_rows + (rows % tile_rows != 0); }
  int64_t tiles_across() const { return columns / tile_columns + (columns % tile_columns != 0); }
  // Tiles of a line of the transposed matrix, with scales of its own.
  int64_t transposed_tiles() const { return rows / tile_columns + (rows % tile_columns != 0); }
};

inline Status WhyNotSizes(const QuantizeProblem& problem) {
  const auto two = [](int64_t a, int64_t b) {
    return std::to_string(a) + " and " + std::to_string(b);
  };
  if (problem.tile_rows < 1 || problem.tile_columns < 1) {
    return "attributes `tile_rows` and `tile_columns` are " +
           two(problem.tile_rows, problem.tile_columns) + ", but need to be at least 1";
  }
  const int64_t shape[] = {problem.rows, problem.columns};
  if (problem.rows < 0 || problem.columns < 0 || Times(ExtentOf(shape), 4) > kMaxBytes) {
    return "the axes of `x` are " + two(problem.rows, problem.columns) +
           ", but need to be at least 0, and `x` at most 2^50 bytes where an empty axis counts as "
           "1 "
           "and a value as 4";
  }
  return {};
}

struct QuantizeBuffers {
  const void* x = nullptr;
  float* scale = nullptr;  // read where it is given, else written
  void* codes = nullptr;
  void* codes_transposed = nullptr;
  float* transposed_scale = nullptr;  // [columns, transposed_tiles]
  float* amax = nullptr;
  void* workspace = nullptr;  // scratch memory, if the platform needs any
  size_t workspace_bytes = 0;
};

}  // namespace jaxfp8
