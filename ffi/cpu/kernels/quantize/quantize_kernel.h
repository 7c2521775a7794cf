// The quantizing functions of an instruction set: three, each on a run of values in a row.

#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxfp8 {

struct QuantizeKernel {
  // The largest finite magnitude of `count` values; 0 if there is none.
  float (*largest)(const uint8_t* x, int64_t count);
  // The bits of the largest magnitude as float32: NaN is larger than infinity.
  uint32_t (*magnitude)(const uint8_t* x, int64_t count);
  // The codes of `count` values times or through a scale; those of int8 are at least `lowest`.
  void (*encode)(const uint8_t* x, int64_t count, float scale, bool multiplies, float lowest,
                 uint8_t* codes);
};

// The functions for a pair of types accepted by `QuantizeWhyNot`, by instruction set.
namespace scalar {
QuantizeKernel QuantizeKernelOf(DType in, DType out);
}
#ifdef JAXFP8_X86
namespace avx2 {
QuantizeKernel QuantizeKernelOf(DType in, DType out);
}
namespace avx512 {
QuantizeKernel QuantizeKernelOf(DType in, DType out);
}
#endif

}  // namespace jaxfp8
