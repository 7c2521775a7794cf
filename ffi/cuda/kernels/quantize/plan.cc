// Which kernels quantize a matrix, from its sizes alone.

#include "common/shapes.h"
#include "cuda/kernels/quantize/quantize.h"

namespace jaxfp8::cuda {
namespace {

// The longest row that stays in registers: 1024 threads, 8 chunks of 16 bytes each.
constexpr int64_t kMaxRowBytes = 1024 * 8 * 16;

}  // namespace

bool PerTensor(const QuantizeProblem& p) {
  return p.tile_rows >= p.rows && p.tile_columns >= p.columns;
}

bool PerRow(const QuantizeProblem& p) { return p.tile_rows == 1 && p.tile_columns >= p.columns; }

bool RowsInRegisters(const QuantizeProblem& p) {
  return PerRow(p) && !p.given_scale && RowBytes(p) <= kMaxRowBytes;
}

bool TwoPasses(const QuantizeProblem& p) {
  return !p.given_scale && !RowsInRegisters(p) && (PerRow(p) || PerTensor(p));
}

Status QuantizeWhyNot(const QuantizeProblem& p) {
  if (!IsWideFloat(p.in) && !IsFloat8(p.in)) {
    return "quantize: the input has to be float32, bfloat16, float16 or FP8";
  }
  if (!IsFloat8(p.out) && p.out != DType::kS8) {
    return "quantize: the output has to be float8_e4m3fn, float8_e5m2 or int8";
  }
  JAXFP8_RETURN_IF_ERROR(WhyNotSizes(p));
  if (IsFloat8(p.in) && (p.out != DType::kS8 || !RowsInRegisters(p) || p.transposed)) {
    return "quantize: FP8 becomes int8 only, in one layout, with a new scale for each row of up to "
           "131072 values";
  }
  const bool tiles =
      p.tile_columns == kQuantizeTile && (p.tile_rows == 1 || p.tile_rows == kQuantizeTile);
  if (!tiles && !PerTensor(p) && !PerRow(p)) {
    return "quantize: a scale must belong to the tensor, a row, or a tile of 1x128 or 128x128";
  }
  if (p.given_scale && p.amax && !PerTensor(p)) {
    return "quantize: with a given scale, an amax needs one scale for the whole tensor";
  }
  if (p.transposed_scale &&
      !(p.transposed && IsFloat8(p.out) && !p.given_scale && !p.amax && p.tile_rows == 1 &&
        p.tile_columns == kQuantizeTile && p.columns > kQuantizeTile)) {
    return "quantize: a transposed output with scales of its own needs FP8, computed scales for "
           "1x128, more than 128 columns and no amax";
  }
  if (TileCount(p.rows, kQuantizeTile) * TileCount(p.columns, kQuantizeTile) >> 31 ||
      p.rows >> 31) {
    return "quantize: more than 2^31 tiles of 128x128 values, or rows";
  }
  if (TwoPasses(p) && !PerTensor(p) && p.rows > 65535) {
    return "quantize: more than 65535 rows of more than 128 KiB";
  }
  return {};
}

size_t QuantizeWorkspace(const QuantizeProblem& p) {
  if (!TwoPasses(p)) return 0;
  return static_cast<size_t>(PerTensor(p) ? 1 : p.rows) * sizeof(float);
}

}  // namespace jaxfp8::cuda
