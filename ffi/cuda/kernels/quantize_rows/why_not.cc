#include "common/shapes.h"
#include "cuda/kernels/quantize_rows/problem.h"

namespace jaxfp8::cuda {
namespace {

// 1024 threads, each with 4 chunks of 8 values.
constexpr int64_t kMostColumns = 32768;

bool IsVector(const RowsProblem& p, DType type) {
  return type == DType::kNone || type == p.in || type == DType::kF32;
}

}  // namespace

Status RowsWhyNot(const RowsProblem& p) {
  if (p.in != DType::kBF16 && p.in != DType::kF16) return "`x` has to be bfloat16 or float16";
  if (!IsFloat8(p.out) && p.out != DType::kS8) {
    return "the codes have to be float8_e4m3fn, float8_e5m2 or int8";
  }
  if (p.rows < 0 || p.rows >> 31) return "`x` has to have fewer than 2^31 rows";
  if (p.columns < 8 || p.columns > kMostColumns || p.columns % 8 != 0) {
    return "a row has " + std::to_string(p.columns) +
           " values, but needs a multiple of 8, up to 32768";
  }
  if (!IsVector(p, p.gain) || !IsVector(p, p.shift)) {
    return "`gain` and `shift` have to be of float32 or of the type of `x`";
  }
  return {};
}

}  // namespace jaxfp8::cuda
