// Why the kernels cannot quantize what they would produce: for a scale of each row, or for scales
// that are given.

#include "common/shapes.h"
#include "cuda/kernels/produce/problem.h"
#include "cuda/kernels/quantize/quantize.h"

namespace jaxfp8::cuda {
namespace {

// 1024 threads, each with 4 chunks of 8 values.
constexpr int64_t kMaxRow = 32768;

Status WhyNotRows(const Production& p) {
  if (p.in != DType::kBF16 && p.in != DType::kF16) {
    return "what is quantized has to be bfloat16 or float16";
  }
  for (DType vector : {p.gain, p.shift}) {
    if (vector == DType::kNone || vector == p.in || vector == DType::kF32) continue;
    return "`gain` and `shift` have to be of float32 or of the type of `x`";
  }
  if (p.columns >= 8 && p.columns % 8 == 0) return {};
  return "`x` has " + std::to_string(p.columns) + " columns, but needs a multiple of 8";
}

}  // namespace

Status RowsWhyNot(const RowsProblem& p) {
  JAXFP8_RETURN_IF_ERROR(WhyNotRows(p));
  if (!IsFloat8(p.out) && p.out != DType::kS8) {
    return "the codes have to be float8_e4m3fn, float8_e5m2 or int8";
  }
  if (p.rows < 0 || p.rows >> 31) return "`x` has to have fewer than 2^31 rows";
  if (p.columns <= kMaxRow) return {};
  return "`x` has " + std::to_string(p.columns) + " columns, but needs at most 32768";
}

Status EncodeWhyNot(const EncodeProblem& p) {
  JAXFP8_RETURN_IF_ERROR(WhyNotRows(p));
  if (!IsFloat8(p.out)) return "the codes have to be float8_e4m3fn or float8_e5m2";
  if (p.rows < 0 ||
      TileCount(p.rows, kQuantizeTile) > INT32_MAX / TileCount(p.columns, kQuantizeTile)) {
    return "`x` has to have fewer than 2^31 tiles of 128 x 128 values";
  }
  if (p.scales >= 1 && p.scales <= kMaxScales) return {};
  return "`scales` is " + std::to_string(p.scales) + ", but needs to be 1 to " +
         std::to_string(kMaxScales);
}

}  // namespace jaxfp8::cuda
