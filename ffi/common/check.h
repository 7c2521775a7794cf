// Checks a call before anything is computed.

#pragma once

#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/spec.h"
#include "common/status.h"

namespace jaxfp8 {

// A buffer as it arrived. `dtype` is kNone for an element type that the scaled dot does not take.
struct Buffer {
  DType dtype;
  Dims shape;
  void* data;
};

// Such as "(4, 8)" and "(4,)".
std::string ShapeText(Dims shape);

// The operands and results of a call, each under one name in every struct.
#define JAXFP8_OF_SIDE(V, side) V(side) V(side##_scale) V(side##_zero_point) V(side##_sums)
#define JAXFP8_OF_OUT(V) V(residual) V(bias) V(out_scale) V(out) V(amax)
#define JAXFP8_BUFFERS(V) JAXFP8_OF_SIDE(V, lhs) JAXFP8_OF_SIDE(V, rhs) JAXFP8_OF_OUT(V)

// The data of a call's operands and results; null where the spec has no array.
struct Buffers {
#define JAXFP8_POINTER(name) void* name = nullptr;
  JAXFP8_BUFFERS(JAXFP8_POINTER)
#undef JAXFP8_POINTER
  DType lhs_scale_type = DType::kF32, lhs_zero_type = DType::kS32;
  DType rhs_scale_type = DType::kF32, rhs_zero_type = DType::kS32;
  DType bias_type = DType::kF32;
};

// Which of them an operand or result is.
using Slot = void* Buffers::*;

// Checks a spec. The message names the attribute, what it got and what it needs.
Status CheckSpec(const ScaledDotSpec& spec);

// What a platform takes beside float32 and int32: any wide float for scales, or for the bias too,
// and 8-bit integers for zero points.
enum class Accepts : uint8_t { kScales, kAsStored };

// Finds and checks the buffers of an accepted spec.
Status BindBuffers(const ScaledDotSpec& spec, const std::vector<Buffer>& operands,
                   const std::vector<Buffer>& results, Accepts accepts, Buffers& buffers);

// Which buffer each operand and result of an accepted spec is, in order.
std::vector<Slot> OperandSlots(const ScaledDotSpec& spec);
std::vector<Slot> ResultSlots(const ScaledDotSpec& spec);

// Refuses null for a buffer of an accepted spec, unless it has no values.
Status WhyNotBound(const ScaledDotSpec& spec, const Buffers& buffers);

}  // namespace jaxfp8
