#include "tests/cpu/call.h"

#include <sstream>

#include "include/jaxfp8/jaxfp8.h"
#include "include/jaxfp8_cpu.h"
#include "tests/cpu/internals.h"

namespace jaxfp8::tests {
namespace {

jaxfp8_dims Dims(const Shape& shape) { return {shape.size(), shape.data()}; }

jaxfp8_operand_spec SpecOf(const SideCase& side) {
  return {NameOf(side.dtype).data(),
          Dims(side.shape),
          Dims(side.contracting),
          Dims(side.batch),
          Dims(side.tiles),
          side.scale,
          side.zero_point,
          0,
          0};
}

jaxfp8_epilogue_spec EpilogueOf(const Case& from) {
  static const Shape none;
  const auto dims = [](const std::optional<Shape>& shape) { return Dims(shape ? *shape : none); };
  return {from.residual.has_value(),
          from.bias.has_value(),
          from.out_scale.has_value(),
          from.amax.has_value(),
          dims(from.residual),
          dims(from.bias),
          dims(from.out_scale),
          dims(from.amax),
          from.residual ? NameOf(from.residual_dtype).data() : "",
          from.activation.c_str(),
          NameOf(from.out_dtype).data()};
}

jaxfp8_scaled_dot_spec SpecOf(const Case& from, const char* kernel) {
  return {sizeof(jaxfp8_scaled_dot_spec),
          SpecOf(from.lhs),
          SpecOf(from.rhs),
          EpilogueOf(from),
          "default",
          kernel};
}

bool IsForXlaOnly(const Case& from) {
  const auto narrow = [](const SideCase& side) {
    return (side.scale && side.scale_type != DType::kF32) || side.scale_rounded ||
           (side.zero_point && side.zero_type != DType::kS32);
  };
  return narrow(from.lhs) || narrow(from.rhs) || (from.bias && from.bias_dtype != DType::kF32);
}

}  // namespace

int Call(const Case& from, const Operands& operands, const Results& results, const char* kernel,
         int threads, std::string& message) {
  const jaxfp8_scaled_dot_spec spec = SpecOf(from, kernel);
  jaxfp8_scaled_dot_buffers buffers = {};
  buffers.struct_size = sizeof(buffers);
  buffers.lhs = operands.lhs.data(), buffers.rhs = operands.rhs.data();
  buffers.lhs_scale = operands.lhs_scale.data();
  buffers.lhs_zero_point = operands.lhs_zero_point.data();
  buffers.rhs_scale = operands.rhs_scale.data();
  buffers.rhs_zero_point = operands.rhs_zero_point.data();
  buffers.residual = operands.residual.data(), buffers.bias = operands.bias.data();
  buffers.out_scale = operands.out_scale.data();
  buffers.out = results.out.data(), buffers.amax = results.amax.data();
  if (IsForXlaOnly(from)) {
    message = CallAsStored(from, spec, buffers, threads).message();
    return message.empty() ? JAXFP8_OK : JAXFP8_INVALID_ARGUMENT;
  }
  char text[1 << 12];
  const int status = jaxfp8_cpu_scaled_dot(&spec, &buffers, threads, text, sizeof text);
  message = text;
  return status;
}

std::string RouteOf(const Case& from) {
  const jaxfp8_scaled_dot_spec spec = SpecOf(from, "");
  char text[1 << 13];
  if (jaxfp8_cpu_route(&spec, text, sizeof text) != JAXFP8_OK) return "";
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(':') == std::string::npos) return line;
  }
  return "";
}

}  // namespace jaxfp8::tests
