// Converts the structs of include/jaxfp8/jaxfp8.h to the types of ffi/common.

#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "common/check.h"
#include "common/spec.h"
#include "common/status.h"
#include "include/jaxfp8/jaxfp8.h"

namespace jaxfp8 {

// Copies as much of a text as fits into a caller's buffer.
inline void WriteText(const std::string& from, char* text, size_t size) {
  if (!text || size == 0) return;
  const size_t count = std::min(from.size(), size - 1);
  std::memcpy(text, from.data(), count);
  text[count] = 0;
}

inline std::string_view ReadText(const char* text) { return text ? text : ""; }

inline Dims ReadDims(const jaxfp8_dims& dims) { return Dims(dims.values, dims.rank); }

inline OperandSpec ReadSide(const jaxfp8_operand_spec& from) {
  OperandSpec to = {ReadText(from.dtype), ReadDims(from.shape), ReadDims(from.contracting),
                    ReadDims(from.batch), ReadDims(from.tiles)};
  to.scale = from.scale != 0, to.zero_point = from.zero_point != 0, to.sums = from.sums != 0;
  to.scale_exponents = from.scale_exponents != 0;
  return to;
}

inline EpilogueSpec ReadEpilogue(const jaxfp8_epilogue_spec& from) {
  return {from.has_residual != 0,   ReadDims(from.residual), ReadText(from.residual_dtype),
          from.has_bias != 0,       ReadDims(from.bias),     ReadText(from.activation),
          ReadText(from.out_dtype), from.has_out_scale != 0, ReadDims(from.out_scale),
          from.has_amax != 0,       ReadDims(from.amax)};
}

template <typename T>
Status CheckStruct(const T* from, const char* name) {
  const std::string start = "`" + std::string(name) + "`";
  if (!from) return start + " is null";
  if (from->struct_size == sizeof(T)) return {};
  return start + "->struct_size is " + std::to_string(from->struct_size) + ", but needs " +
         std::to_string(sizeof(T)) + ": the library and its caller are of different versions";
}

// Finds lists of sizes or axes with a rank and no values.
inline Status CheckDims(const jaxfp8_scaled_dot_spec& spec) {
  const jaxfp8_operand_spec &l = spec.lhs, &r = spec.rhs;
  const jaxfp8_epilogue_spec& e = spec.epilogue;
  const struct {
    const char* name;
    jaxfp8_dims lists[4];
  } all[] = {{"lhs", {l.shape, l.contracting, l.batch, l.tiles}},
             {"rhs", {r.shape, r.contracting, r.batch, r.tiles}},
             {"epilogue", {e.residual, e.bias, e.out_scale, e.amax}}};
  for (const auto& [name, lists] : all) {
    for (const jaxfp8_dims& dims : lists) {
      if (dims.values || dims.rank == 0) continue;
      return "`spec`->" + std::string(name) + " has a list of rank " + std::to_string(dims.rank) +
             " whose values are null, but needs that many values";
    }
  }
  return {};
}

// Reads and checks a request.
inline Status ReadRequest(const jaxfp8_scaled_dot_spec* from, Request& to) {
  JAXFP8_RETURN_IF_ERROR(CheckStruct(from, "spec"));
  JAXFP8_RETURN_IF_ERROR(CheckDims(*from));
  to = {{ReadSide(from->lhs), ReadSide(from->rhs), ReadEpilogue(from->epilogue),
         ReadText(from->precision)},
        ReadText(from->kernel)};
  return CheckSpec(to.spec);
}

// Reads the buffers that a spec needs, and checks that none is null.
inline Status ReadBuffers(const jaxfp8_scaled_dot_buffers* from, const ScaledDotSpec& spec,
                          Buffers& to) {
  JAXFP8_RETURN_IF_ERROR(CheckStruct(from, "buffers"));
#define JAXFP8_READ(name) to.name = const_cast<void*>(static_cast<const void*>(from->name));
  JAXFP8_BUFFERS(JAXFP8_READ)
#undef JAXFP8_READ
  if (spec.lhs.scale_exponents) to.lhs_scale_type = DType::kU8;
  if (spec.rhs.scale_exponents) to.rhs_scale_type = DType::kU8;
  return WhyNotBound(spec, to);
}

// Turns the status of `work` into a status of C and a message. No exception leaves this function.
template <typename Work>
int Answer(char* message, size_t size, const Work& work) {
  try {
    const Status status = work();
    WriteText(status.message(), message, size);
    return status.ok() ? JAXFP8_OK : JAXFP8_INVALID_ARGUMENT;
  } catch (const std::bad_alloc&) {
    WriteText("out of memory", message, size);
    return JAXFP8_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    WriteText(error.what(), message, size);
    return JAXFP8_FAILED;
  }
}

}  // namespace jaxfp8
