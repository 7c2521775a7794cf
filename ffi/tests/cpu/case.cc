#include "tests/cpu/case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/abi.h"
#include "common/encode.h"
#include "cpu/float_mode.h"
#include "cpu/own_threads.h"
#include "cpu/run.h"
#include "tests/cpu/reference.h"

namespace jaxfp8::tests {
namespace {

bool Contains(const Shape& axes, int64_t axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

double Uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}

int64_t Below(Random& random, int64_t end) {
  return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
}

// One value of a side in 8 bits.
uint8_t DrawCode(DType dtype, Values values, Random& random) {
  for (;;) {
    const auto code = static_cast<uint8_t>(Below(random, 256));
    if (std::isfinite(DecodedCode(dtype, code))) return code;
    if (values == Values::kSpecial && Below(random, 4) == 0) return code;
  }
}

double DrawWide(Values values, Random& random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (values == Values::kSpecial && Below(random, 40) == 0) {
    const double special[] = {kInfinity, -kInfinity, std::nan(""), 0.0, -0.0};
    return special[Below(random, 5)];
  }
  return Uniform(random, -2.0, 2.0);
}

void DrawSide(const Array& array, Values values, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) {
    if (IsEightBit(array.dtype())) {
      array.data()[i] = DrawCode(array.dtype(), values, random);
    } else {
      Put(array, i, DrawWide(values, random));
    }
  }
}

void DrawScales(const Array& array, double factor, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) {
    Put(array, i, factor * std::exp2(Uniform(random, -3, 3)));
  }
}

void DrawZeroPoints(const Array& array, DType dtype, Random& random) {
  const int64_t low = dtype == DType::kS8 ? -128 : 0;
  for (int64_t i = 0; i < array.count(); ++i) {
    const auto zero = static_cast<int32_t>(low + Below(random, 256));
    if (array.dtype() == DType::kS32) {
      array.as<int32_t>()[i] = zero;
    } else {
      array.data()[i] = static_cast<uint8_t>(zero);
    }
  }
}

void DrawPlane(const Array& array, Random& random) {
  for (int64_t i = 0; i < array.count(); ++i) Put(array, i, Uniform(random, -2, 2));
}

Array Given(bool given, DType dtype, const Shape& shape, int64_t shift = 0) {
  return given ? Array(dtype, shape, shift) : Array();
}

jaxfp8_dims Dims(const Shape& shape) { return {shape.size(), shape.data()}; }

jaxfp8_operand_spec SpecOf(const SideCase& side) {
  return {NameOf(side.dtype).data(), Dims(side.shape), Dims(side.contracting), Dims(side.batch),
          Dims(side.tiles),          side.scale,       side.zero_point};
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

std::string TextOf(const Shape& shape) {
  std::string text = "[";
  for (int64_t size : shape) text += (text.size() > 1 ? "," : "") + std::to_string(size);
  return text + "]";
}

std::string TextOf(const SideCase& side) {
  return std::string(NameOf(side.dtype)) + TextOf(side.shape) + " contracting " +
         TextOf(side.contracting) + " batch " + TextOf(side.batch) + " tiles " +
         TextOf(side.tiles) +
         (side.scale ? " scaled by " + std::string(NameOf(side.scale_type)) : "") +
         (side.zero_point ? " with zero points of " + std::string(NameOf(side.zero_type)) : "");
}

}  // namespace

int64_t CountOf(const Shape& shape) {
  int64_t size = 1;
  for (int64_t axis : shape) size *= axis;
  return size;
}

Array::Array(DType dtype, const Shape& shape, int64_t shift)
    : dtype_(dtype), count_(CountOf(shape)), shift_(shift), bytes_(new uint8_t[shift + bytes()]) {}

Shape SideCase::ScaleShape() const {
  Shape sizes;
  for (size_t i = 0; i < shape.size(); ++i) {
    sizes.push_back((shape[i] + tiles[i] - 1) / tiles[i]);
  }
  return sizes;
}

Shape SideCase::Free() const {
  Shape axes;
  for (int64_t axis = 0; axis < static_cast<int64_t>(shape.size()); ++axis) {
    if (!Contains(contracting, axis) && !Contains(batch, axis)) axes.push_back(axis);
  }
  return axes;
}

Shape Case::OutShape() const {
  Shape out;
  for (size_t i = 0; i < lhs.batch.size(); ++i) {
    const int64_t left = lhs.shape[lhs.batch[i]], right = rhs.shape[rhs.batch[i]];
    out.push_back(left == 1 ? right : left);
  }
  for (const SideCase* side : {&lhs, &rhs}) {
    for (int64_t axis : side->Free()) out.push_back(side->shape[axis]);
  }
  return out;
}

std::string Case::Text() const {
  std::string text = TextOf(lhs) + " x " + TextOf(rhs) + " -> " + std::string(NameOf(out_dtype));
  if (activation != "none") text += ", " + activation;
  if (residual) {
    text += ", residual " + std::string(NameOf(residual_dtype)) + TextOf(*residual);
  }
  if (bias) text += ", bias " + TextOf(*bias);
  if (out_scale) text += ", out_scale " + TextOf(*out_scale);
  if (amax) text += ", amax " + TextOf(*amax);
  return text;
}

void Put(const Array& array, int64_t i, double value) {
  const auto narrow = static_cast<float>(value);
  switch (array.dtype()) {
    case DType::kF32:
      array.as<float>()[i] = narrow;
      return;
    case DType::kBF16:
      array.as<uint16_t>()[i] = EncodeBF16(narrow);
      return;
    case DType::kF16:
      array.as<uint16_t>()[i] = EncodeF16(narrow);
      return;
    case DType::kE4M3:
      array.data()[i] = EncodeE4M3(narrow);
      return;
    case DType::kE5M2:
      array.data()[i] = EncodeE5M2(narrow);
      return;
    default:
      array.data()[i] = static_cast<uint8_t>(static_cast<int>(value));
  }
}

void FillWithCodes(const Array& array, bool finite) {
  for (int64_t i = 0; i < array.count(); ++i) {
    const auto code = static_cast<uint8_t>(i + i / 256);
    const bool taken = !finite || std::isfinite(DecodedCode(array.dtype(), code));
    array.data()[i] = taken ? code : 0;
  }
}

Operands DrawOperands(const Case& from, Values values, Random& random) {
  // Half of the cases start at an odd place: one element after that of the allocator.
  const int64_t odd = Below(random, 2);
  Operands to;
  to.lhs = Array(from.lhs.dtype, from.lhs.shape, odd * SizeOf(from.lhs.dtype));
  to.rhs = Array(from.rhs.dtype, from.rhs.shape, odd * SizeOf(from.rhs.dtype));
  DrawSide(to.lhs, values, random);
  DrawSide(to.rhs, values, random);
  to.lhs_scale = Given(from.lhs.scale, from.lhs.scale_type, from.lhs.ScaleShape(), 4 * odd);
  to.rhs_scale = Given(from.rhs.scale, from.rhs.scale_type, from.rhs.ScaleShape(), 4 * odd);
  DrawScales(to.lhs_scale, 1.0, random);
  DrawScales(to.rhs_scale, 1.0, random);
  to.lhs_zero_point = Given(from.lhs.zero_point, from.lhs.zero_type, from.lhs.ScaleShape());
  to.rhs_zero_point = Given(from.rhs.zero_point, from.rhs.zero_type, from.rhs.ScaleShape());
  DrawZeroPoints(to.lhs_zero_point, from.lhs.dtype, random);
  DrawZeroPoints(to.rhs_zero_point, from.rhs.dtype, random);
  const auto plane = [](const std::optional<Shape>& shape, DType dtype) {
    return shape ? Array(dtype, *shape) : Array();
  };
  to.residual = plane(from.residual, from.residual_dtype);
  to.bias = plane(from.bias, from.bias_dtype);
  to.out_scale = plane(from.out_scale, DType::kF32);
  DrawPlane(to.residual, random);
  DrawPlane(to.bias, random);
  DrawScales(to.out_scale, 0.3, random);
  return to;
}

Results SoiledResults(const Case& from) {
  Results to;
  to.out = Array(from.out_dtype, from.OutShape());
  if (from.amax) to.amax = Array(DType::kF32, *from.amax);
  for (const Array* array : {&to.out, &to.amax}) {
    if (array->data()) std::memset(array->data(), 0xa5, array->bytes());
  }
  return to;
}

namespace {

bool IsForXlaOnly(const Case& from) {
  const auto narrow = [](const SideCase& side) {
    return (side.scale && side.scale_type != DType::kF32) ||
           (side.zero_point && side.zero_type != DType::kS32);
  };
  return narrow(from.lhs) || narrow(from.rhs) || (from.bias && from.bias_dtype != DType::kF32);
}

std::string CallAsStored(const Case& from, const jaxfp8_scaled_dot_spec& spec,
                         const jaxfp8_scaled_dot_buffers& given, int threads) {
  Request request;
  Buffers buffers;
  std::string wrong = ReadRequest(&spec, request);
  if (wrong.empty()) wrong = ReadBuffers(&given, request.spec, buffers);
  if (!wrong.empty()) return wrong;
  buffers.lhs_scale_type = from.lhs.scale_type;
  buffers.rhs_scale_type = from.rhs.scale_type;
  buffers.lhs_zero_type = from.lhs.zero_type;
  buffers.rhs_zero_type = from.rhs.zero_type;
  buffers.bias_type = from.bias_dtype;
  const FloatMode mode;
  OwnThreads pool(threads);
  return Run(request.spec, buffers, request.kernel, pool);
}

}  // namespace

int Call(const Case& from, const Operands& operands, const Results& results, const char* kernel,
         int threads, std::string& message) {
  const jaxfp8_scaled_dot_spec spec = {sizeof(spec),     SpecOf(from.lhs), SpecOf(from.rhs),
                                       EpilogueOf(from), "default",        kernel};
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
    message = CallAsStored(from, spec, buffers, threads);
    return message.empty() ? JAXFP8_OK : JAXFP8_INVALID_ARGUMENT;
  }
  char text[1 << 12];
  const int status = jaxfp8_cpu_scaled_dot(&spec, &buffers, threads, text, sizeof text);
  message = text;
  return status;
}

}  // namespace jaxfp8::tests
