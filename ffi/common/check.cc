#include "common/check.h"

#include <algorithm>
#include <string_view>

#include "common/activation.h"
#include "common/shapes.h"
#include "common/sizes.h"

namespace jaxfp8 {

std::string ShapeText(Dims shape) {
  std::string out = "(";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + (shape.size() == 1 ? ",)" : ")");
}

namespace {

using Shape = std::vector<int64_t>;

std::string Say(const std::string& what, const std::string& got, const std::string& needs) {
  return what + " " + got + ", but needs " + needs;
}

bool Same(Dims a, Dims b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// Checks one side by itself.
class SideCheck {
 public:
  SideCheck(const OperandSpec& side, const std::string& name) : side_(side), name_(name) {}

  Status Run() const {
    JAXFP8_RETURN_IF_ERROR(Types());
    JAXFP8_RETURN_IF_ERROR(Sizes());
    JAXFP8_RETURN_IF_ERROR(Axes());
    return Tiles();
  }

 private:
  std::string Attribute(const char* field) const {
    return "attribute `" + name_ + "_" + field + "`";
  }

  Status Types() const {
    const DType type = ParseDType(side_.dtype);
    if (!IsEightBit(type) && !IsWideFloat(type)) {
      return Say(Attribute("dtype"), "is `" + std::string(side_.dtype) + "`",
                 "float8_e4m3fn, float8_e5m2, int8, uint8, float32, bfloat16 or float16");
    }
    if (side_.zero_point && !IsInt8(type)) {
      return Say(Attribute("zero_point"), "is given for " + std::string(side_.dtype),
                 "values of int8 or uint8");
    }
    if (side_.sums && !IsInt8(type)) {
      return Say(Attribute("sums"), "is set for " + std::string(side_.dtype),
                 "values of int8 or uint8");
    }
    if (side_.scale_rounded && !side_.scale) {
      return Say(Attribute("scale_rounded"), "is set", Attribute("scale") + " to be set too");
    }
    if (side_.scale_exponents && (!side_.scale || side_.scale_rounded)) {
      return Say(Attribute("scale_exponents"), "is set",
                 Attribute("scale") + " to be set too, and no rounding");
    }
    return {};
  }

  Status Sizes() const {
    const auto negative = [](int64_t size) { return size < 0; };
    if (std::none_of(side_.shape.begin(), side_.shape.end(), negative)) return {};
    return Say(Attribute("shape"), "is " + ShapeText(side_.shape), "sizes of at least 0");
  }

  Status Axes() const {
    const auto rank = static_cast<int64_t>(side_.shape.size());
    std::vector<bool> used(rank);
    for (Dims axes : {side_.contracting, side_.batch}) {
      for (int64_t axis : axes) {
        if (axis < 0 || axis >= rank || used[axis]) {
          return Say(Attribute("contracting") + " and `" + name_ + "_batch`",
                     "are " + ShapeText(side_.contracting) + " and " + ShapeText(side_.batch),
                     "different axes of shape " + ShapeText(side_.shape));
        }
        used[axis] = true;
      }
    }
    return {};
  }

  Status Tiles() const {
    const bool positive =
        std::all_of(side_.tiles.begin(), side_.tiles.end(), [](int64_t tile) { return tile >= 1; });
    if (side_.tiles.size() == side_.shape.size() && positive) return {};
    return Say(Attribute("tiles"), "is " + ShapeText(side_.tiles),
               "one size of at least 1 for each axis of shape " + ShapeText(side_.shape));
  }

  const OperandSpec& side_;
  const std::string name_;
};

Status CheckPair(const OperandSpec& lhs, const OperandSpec& rhs) {
  if (!IsEightBit(ParseDType(lhs.dtype)) && !IsEightBit(ParseDType(rhs.dtype))) {
    return Say("`lhs` and `rhs`",
               "are " + std::string(lhs.dtype) + " and " + std::string(rhs.dtype),
               "at least one of them in 8 bits");
  }
  const auto match = [&](Dims left, Dims right, bool shared) {
    if (left.size() != right.size()) return false;
    for (size_t i = 0; i < left.size(); ++i) {
      const int64_t l = lhs.shape[left[i]], r = rhs.shape[right[i]];
      if (l != r && !(shared && (l == 1 || r == 1))) return false;
    }
    return true;
  };
  const std::string shapes = "of shapes " + ShapeText(lhs.shape) + " and " + ShapeText(rhs.shape);
  if (!match(lhs.contracting, rhs.contracting, false)) {
    return Say("contracting axes",
               ShapeText(lhs.contracting) + " and " + ShapeText(rhs.contracting) + " " + shapes,
               "equal sizes in pairs");
  }
  if (!match(lhs.batch, rhs.batch, true)) {
    return Say("batch axes", ShapeText(lhs.batch) + " and " + ShapeText(rhs.batch) + " " + shapes,
               "equal sizes in pairs, or 1 on one side");
  }
  return {};
}

Status CheckPlane(const char* name, bool given, Dims shape, const Shape& out) {
  if (!given) return {};
  bool fits = shape.size() == out.size();
  for (size_t i = 0; fits && i < out.size(); ++i) fits = shape[i] == 1 || shape[i] == out[i];
  if (fits) return {};
  return Say("attribute `" + std::string(name) + "`", "is " + ShapeText(shape),
             "the rank of the output " + ShapeText(out) + ", each axis 1 or full");
}

Status CheckOutType(const ScaledDotSpec& spec) {
  const EpilogueSpec& epilogue = spec.epilogue;
  const DType out = ParseDType(epilogue.out_dtype);
  const std::string got = "is `" + std::string(epilogue.out_dtype) + "`";
  if (out == DType::kNone) {
    return Say("attribute `out_dtype`", got, "one of " + std::string(kDTypeList));
  }
  if (epilogue.has_out_scale && !IsEightBit(out)) {
    return Say("attribute `has_out_scale`", "is set for " + std::string(epilogue.out_dtype),
               "an output of 8 bits");
  }
  if (out != DType::kS32) return {};
  const bool integers = IsInt8(ParseDType(spec.lhs.dtype)) && IsInt8(ParseDType(spec.rhs.dtype));
  const bool plain = !spec.lhs.scale && !spec.rhs.scale && !epilogue.has_residual &&
                     !epilogue.has_bias && epilogue.activation == "none";
  if (integers && plain) return {};
  return Say("attribute `out_dtype`", got,
             "int8 or uint8 operands without scales, and no residual, bias or activation");
}

Status CheckEpilogue(const ScaledDotSpec& spec, const Shape& out) {
  const EpilogueSpec& epilogue = spec.epilogue;
  if (ParseActivation(epilogue.activation) == Activation::kUnknown) {
    return Say("attribute `activation`", "is `" + std::string(epilogue.activation) + "`",
               "one of " + std::string(kActivationNames));
  }
  if (epilogue.has_residual && !IsWideFloat(ParseDType(epilogue.residual_dtype))) {
    return Say("attribute `residual_dtype`", "is `" + std::string(epilogue.residual_dtype) + "`",
               "float32, bfloat16 or float16");
  }
  JAXFP8_RETURN_IF_ERROR(CheckPlane("residual", epilogue.has_residual, epilogue.residual, out));
  JAXFP8_RETURN_IF_ERROR(CheckPlane("bias", epilogue.has_bias, epilogue.bias, out));
  JAXFP8_RETURN_IF_ERROR(CheckPlane("out_scale", epilogue.has_out_scale, epilogue.out_scale, out));
  JAXFP8_RETURN_IF_ERROR(CheckPlane("amax", epilogue.has_amax, epilogue.amax, out));
  return CheckOutType(spec);
}

// Empty axes count as 1, so that strides are bounded too.
Status CheckSize(const char* name, const char* what, Dims shape, int64_t bytes_each) {
  if (Times(ExtentOf(shape), bytes_each) <= kMaxBytes) return {};
  return Say("`" + std::string(name) + what + "`", "has shape " + ShapeText(shape),
             "at most 2^50 bytes where an empty axis counts as 1 and a value as " +
                 std::to_string(bytes_each));
}

// Checks the size of every array, and with it every product of its axes. Arrays of the output's
// shape, accumulators included, have at most four bytes a value.
Status CheckSizes(const ScaledDotSpec& spec, Dims out) {
  for (const auto& [side, name] : {std::pair(&spec.lhs, "lhs"), std::pair(&spec.rhs, "rhs")}) {
    JAXFP8_RETURN_IF_ERROR(CheckSize(name, "", side->shape, SizeOf(ParseDType(side->dtype))));
    if (side->scale || side->zero_point) {
      JAXFP8_RETURN_IF_ERROR(CheckSize(name, "_scale", TileCounts(*side), sizeof(float)));
    }
    if (side->sums) {
      JAXFP8_RETURN_IF_ERROR(CheckSize(name, "_sums", SumsShape(*side), sizeof(int32_t)));
    }
  }
  return CheckSize("out", "", out, sizeof(float));
}

// The dtypes that an operand may have besides its own.
struct Others {
  bool (*has)(DType);
  const char* names;
};
constexpr Others kNoOthers = {[](DType) { return false; }, ""};
constexpr Others kBytes = {IsInt8, ", int8 or uint8"};
constexpr Others kFloats = {IsWideFloat, ", bfloat16 or float16"};

// A buffer that the spec asks for.
struct Wanted {
  const char* name;
  std::string_view dtype;
  Shape shape;
  Slot data;
  Others others = kNoOthers;
  DType Buffers::* type = nullptr;  // set to its dtype, if others are allowed

  bool IsScale() const {
    return type == &Buffers::lhs_scale_type || type == &Buffers::rhs_scale_type;
  }
};

Shape Copy(Dims dims) { return Shape(dims.begin(), dims.end()); }

std::vector<Wanted> WantedOperands(const ScaledDotSpec& spec) {
  const EpilogueSpec& epilogue = spec.epilogue;
  std::vector<Wanted> wanted = {
      {"lhs", spec.lhs.dtype, Copy(spec.lhs.shape), &Buffers::lhs},
      {"rhs", spec.rhs.dtype, Copy(spec.rhs.shape), &Buffers::rhs},
  };
  const auto add = [&](bool given, Wanted one) {
    if (given) wanted.push_back(std::move(one));
  };
  const Shape lhs = TileCounts(spec.lhs), rhs = TileCounts(spec.rhs);
  const auto scales = [](const OperandSpec& side) {
    return side.scale_rounded || side.scale_exponents ? kNoOthers : kFloats;
  };
  const auto plain = [](const OperandSpec& side) {
    return side.scale_exponents ? "uint8" : "float32";
  };
  add(spec.lhs.scale, {"lhs_scale", plain(spec.lhs), lhs, &Buffers::lhs_scale, scales(spec.lhs),
                       &Buffers::lhs_scale_type});
  add(spec.lhs.zero_point,
      {"lhs_zero_point", "int32", lhs, &Buffers::lhs_zero_point, kBytes, &Buffers::lhs_zero_type});
  add(spec.lhs.sums, {"lhs_sums", "int32", SumsShape(spec.lhs), &Buffers::lhs_sums});
  add(spec.rhs.scale, {"rhs_scale", plain(spec.rhs), rhs, &Buffers::rhs_scale, scales(spec.rhs),
                       &Buffers::rhs_scale_type});
  add(spec.rhs.zero_point,
      {"rhs_zero_point", "int32", rhs, &Buffers::rhs_zero_point, kBytes, &Buffers::rhs_zero_type});
  add(spec.rhs.sums, {"rhs_sums", "int32", SumsShape(spec.rhs), &Buffers::rhs_sums});
  add(epilogue.has_residual,
      {"residual", epilogue.residual_dtype, Copy(epilogue.residual), &Buffers::residual});
  add(epilogue.has_bias,
      {"bias", "float32", Copy(epilogue.bias), &Buffers::bias, kFloats, &Buffers::bias_type});
  add(epilogue.has_out_scale,
      {"out_scale", "float32", Copy(epilogue.out_scale), &Buffers::out_scale});
  return wanted;
}

std::vector<Wanted> WantedResults(const ScaledDotSpec& spec) {
  std::vector<Wanted> wanted = {{"out", spec.epilogue.out_dtype, OutShape(spec), &Buffers::out}};
  if (spec.epilogue.has_amax) {
    wanted.push_back({"amax", "float32", Copy(spec.epilogue.amax), &Buffers::amax});
  }
  return wanted;
}

// FP8 may arrive as uint8, int8 or as itself.
bool Carries(DType buffer, DType logical) {
  if (IsFloat8(logical)) return buffer == logical || IsInt8(buffer);
  return buffer == logical;
}

std::string Needed(const Wanted& wanted, const Others& others) {
  const bool bytes = IsFloat8(ParseDType(wanted.dtype));
  return std::string(wanted.dtype) + (bytes ? " (as uint8)" : "") + others.names;
}

Status Bind(const std::vector<Wanted>& wanted, const std::vector<Buffer>& given, Accepts accepts,
            const std::string& kind, Buffers& buffers) {
  if (wanted.size() != given.size()) {
    std::string names;
    for (const Wanted& one : wanted) names += (names.empty() ? "" : ", ") + std::string(one.name);
    return Say("the call", "has " + std::to_string(given.size()) + " " + kind,
               std::to_string(wanted.size()) + ": " + names);
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    const std::string name = "`" + std::string(wanted[i].name) + "`";
    const DType type = given[i].dtype;
    const bool as_stored = accepts == Accepts::kAsStored || wanted[i].IsScale();
    const Others others = as_stored ? wanted[i].others : kNoOthers;
    if (!Carries(type, ParseDType(wanted[i].dtype)) && !others.has(type)) {
      return Say(name, "is a buffer of " + std::string(NameOf(type)), Needed(wanted[i], others));
    }
    if (wanted[i].type) buffers.*wanted[i].type = type;
    if (!Same(given[i].shape, wanted[i].shape)) {
      return Say(name, "has shape " + ShapeText(given[i].shape), ShapeText(wanted[i].shape));
    }
    buffers.*wanted[i].data = given[i].data;
  }
  return {};
}

std::vector<Slot> SlotsOf(const std::vector<Wanted>& wanted) {
  std::vector<Slot> slots;
  for (const Wanted& one : wanted) slots.push_back(one.data);
  return slots;
}

}  // namespace

Status CheckSpec(const ScaledDotSpec& spec) {
  for (const auto& [side, name] : {std::pair(&spec.lhs, "lhs"), std::pair(&spec.rhs, "rhs")}) {
    JAXFP8_RETURN_IF_ERROR(SideCheck(*side, name).Run());
  }
  JAXFP8_RETURN_IF_ERROR(CheckPair(spec.lhs, spec.rhs));
  if (spec.precision != "default" && spec.precision != "highest") {
    return Say("attribute `precision`", "is `" + std::string(spec.precision) + "`",
               "default or highest");
  }
  const Shape out = OutShape(spec);
  JAXFP8_RETURN_IF_ERROR(CheckSizes(spec, out));
  return CheckEpilogue(spec, out);
}

Status BindBuffers(const ScaledDotSpec& spec, const std::vector<Buffer>& operands,
                   const std::vector<Buffer>& results, Accepts accepts, Buffers& buffers) {
  JAXFP8_RETURN_IF_ERROR(Bind(WantedOperands(spec), operands, accepts, "operands", buffers));
  return Bind(WantedResults(spec), results, accepts, "results", buffers);
}

std::vector<Slot> OperandSlots(const ScaledDotSpec& spec) { return SlotsOf(WantedOperands(spec)); }
std::vector<Slot> ResultSlots(const ScaledDotSpec& spec) { return SlotsOf(WantedResults(spec)); }

Status WhyNotBound(const ScaledDotSpec& spec, const Buffers& buffers) {
  for (const auto& all : {WantedOperands(spec), WantedResults(spec)}) {
    for (const Wanted& one : all) {
      const bool empty = std::find(one.shape.begin(), one.shape.end(), 0) != one.shape.end();
      if (buffers.*one.data || empty) continue;
      return Say("`" + std::string(one.name) + "`", "is null",
                 "the address of " + std::string(one.dtype) + " of shape " + ShapeText(one.shape));
    }
  }
  return {};
}

}  // namespace jaxfp8
