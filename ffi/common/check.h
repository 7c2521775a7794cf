// Whether a call makes sense, before anything is computed.

#ifndef JAXFP8_CPU_CHECK_H_
#define JAXFP8_CPU_CHECK_H_

#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/spec.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// A buffer as it arrived; `dtype` is kNone for an element type the scaled dot has no use for.
struct Buffer {
  DType dtype;
  Dims shape;
  void* data;
};

// What is wrong with the spec itself: operation, attribute, got, needs. "" if nothing is.
std::string CheckSpec(const ScaledDotSpec& spec);

// Finds the buffers of an accepted spec. Returns what is wrong with them, "" if nothing is.
std::string BindBuffers(const ScaledDotSpec& spec, const std::vector<Buffer>& operands,
                        const std::vector<Buffer>& results, Buffers& buffers);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_CHECK_H_
