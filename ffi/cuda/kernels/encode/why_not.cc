#include "common/shapes.h"
#include "cuda/kernels/encode/problem.h"
#include "cuda/kernels/quantize/plan.h"

namespace jaxfp8::cuda {

Status EncodeWhyNot(const EncodeProblem& p) {
  if (p.in != DType::kBF16 && p.in != DType::kF16) {
    return "what is encoded has to be bfloat16 or float16";
  }
  if (!IsFloat8(p.out)) return "the codes have to be float8_e4m3fn or float8_e5m2";
  if (p.columns < 8 || p.columns % 8 != 0) {
    return "`x` has " + std::to_string(p.columns) + " columns, but needs a multiple of 8";
  }
  if (p.rows < 0 ||
      TileCount(p.rows, kQuantizeTile) > INT32_MAX / TileCount(p.columns, kQuantizeTile)) {
    return "`x` has to have fewer than 2^31 tiles of 128 x 128 values";
  }
  if (p.scales < 1 || p.scales > kMostScales) {
    return "`scales` is " + std::to_string(p.scales) + ", but needs to be 1 to " +
           std::to_string(kMostScales);
  }
  return {};
}

}  // namespace jaxfp8::cuda
