// The C interface and the quantizing functions with invalid arguments. Nothing is read or written
// out of bounds, sizes do not overflow, nothing takes long, and a refusal gives a reason.
//
//   fuzz [--specs COUNT] [--seed NUMBER]

#include "tests/fuzz.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/shapes.h"
#include "cpu/pool.h"
#include "cpu/quantize.h"
#include "cpu/ragged.h"
#include "cpu/route.h"
#include "include/jaxfp8_cpu.h"
#include "tests/cpu/draw.h"
#include "tests/wild.h"
#include "tests/wild_data.h"

namespace jaxfp8::tests {
namespace {

WildSide WildOf(const SideCase& side) {
  return {std::string(NameOf(side.dtype)),
          side.shape,
          side.contracting,
          side.batch,
          side.tiles,
          side.scale,
          side.zero_point,
          IsInt8(side.dtype) && side.shape.size() % 2 == 0};
}

Wild WildOf(const Case& from) {
  Wild to;
  to.lhs = WildOf(from.lhs), to.rhs = WildOf(from.rhs);
  const auto plane = [](const std::optional<Shape>& shape, int32_t& has, Shape& sizes) {
    has = shape.has_value();
    sizes = shape.value_or(Shape{});
  };
  plane(from.residual, to.has_residual, to.residual);
  plane(from.bias, to.has_bias, to.bias);
  plane(from.out_scale, to.has_out_scale, to.out_scale);
  plane(from.amax, to.has_amax, to.amax);
  to.residual_dtype = from.residual ? NameOf(from.residual_dtype) : "";
  to.activation = from.activation;
  to.out_dtype = NameOf(from.out_dtype);
  return to;
}

constexpr double kMaxValues = 1 << 20;  // that are quantized

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed), wilder_(random_) {}

  void RunSpec() {
    Wild wild = WildOf(DrawCase(random_));
    for (int64_t changes = wilder_.Below(4); changes > 0; --changes) wilder_.Change(wild);
    const jaxfp8_scaled_dot_spec spec = wild.Spec();
    const std::string name = TextOf(wild);
    const Message told(wilder_.Pick<int64_t>({0, 1, 40, 4096}));
    const int status = jaxfp8_cpu_route(&spec, told.data(), told.size());
    ExpectAnswer(status, told, "route of " + name);
    const bool taken = status == JAXFP8_OK;
    Expect(!taken || !IsBeyondLimits(wild), "too large, but routed: " + name);
    accepted_ += taken;
    RunWithoutData(spec, name, taken);
    if (taken && WildData::IsSmall(wild)) RunWithData(wild, spec, name);
    if (wilder_.Below(4) == 0) RunGroups();
  }

  void RunQuantize() {
    QuantizeProblem problem;
    problem.rows = wilder_.Below(3) ? wilder_.Below(40) : wilder_.Size();
    problem.columns = wilder_.Below(3) ? wilder_.Below(200) : wilder_.Size();
    problem.tile_rows = wilder_.Below(3) ? 1 + wilder_.Below(8) : wilder_.Size();
    problem.tile_columns = wilder_.Below(3) ? 1 + wilder_.Below(70) : wilder_.Size();
    problem.in = wilder_.Pick<DType>({DType::kF32, DType::kBF16, DType::kF16, DType::kS8});
    problem.out = wilder_.Pick<DType>({DType::kE4M3, DType::kE5M2, DType::kS8, DType::kF32});
    problem.given_scale = wilder_.Below(2), problem.amax = wilder_.Below(2);
    problem.transposed = wilder_.Below(20) == 0, problem.plain = wilder_.Below(2);
    problem.multiplies = wilder_.Below(2), problem.power_of_two = wilder_.Below(2);
    problem.lowest = wilder_.Below(8) ? -wilder_.Below(129) : wilder_.Size();
    if (!QuantizeWhyNot(problem, "").ok()) return;
    const double values = static_cast<double>(problem.rows) * problem.columns;
    if (values > kMaxValues) return;
    ++quantized_;
    const Shape shape = {problem.rows, problem.columns};
    const Shape tiles = {problem.tiles_down(), problem.tiles_across()};
    const Array x(problem.in, shape), codes(problem.out, shape);
    const Array scale(DType::kF32, tiles), amax(DType::kF32, tiles);
    for (const Array* array : {&x, &scale}) {
      for (int64_t i = 0; i < array->bytes(); ++i) {
        array->data()[i] = static_cast<uint8_t>(random_());
      }
    }
    QuantizeBuffers buffers;
    buffers.x = x.data(), buffers.codes = codes.data(), buffers.scale = scale.as<float>();
    buffers.amax = problem.amax ? amax.as<float>() : nullptr;
    OwnThreads pool(Threads());
    Quantize(problem, buffers, "", pool);
    if (problem.rows > kMaxValues) return;
    const Array rows(DType::kF32, {problem.rows});
    FindRowAmax(x.data(), problem.in, problem.rows, problem.columns, rows.as<float>(), pool);
  }

  // Groups of any sizes, of arrays in any order and tiles.
  void RunGroups() {
    const int64_t groups = wilder_.Below(4), positions = wilder_.Below(20),
                  depth = wilder_.Below(40);
    RaggedCall call;
    call.grouping =
        wilder_.Pick<RaggedKind>({RaggedKind::kRows, RaggedKind::kMasked, RaggedKind::kContracted});
    const bool contracted = call.grouping == RaggedKind::kContracted;
    const bool masked = call.grouping == RaggedKind::kMasked;
    const int64_t contracting = wilder_.Below(6) ? !contracted : wilder_.Below(2);
    const Shape lhs = {positions, depth}, axis = {contracting}, none;
    const Shape rhs = {contracted ? positions : depth, wilder_.Below(40)}, first = {0};
    const Shape tiles = {wilder_.Pick<int64_t>({1, 3, 64}), wilder_.Pick<int64_t>({8, 64})};
    call.spec.lhs = {"float8_e4m3fn", lhs, axis, none, tiles, true};
    call.spec.rhs = {"float8_e4m3fn", rhs, first, none, tiles, true};
    call.spec.epilogue.out_dtype = "bfloat16", call.spec.epilogue.activation = "none";
    call.spec.precision = "default";
    if (!CheckSpec(call.spec).ok()) return;
    const auto with_groups = [&](bool has, Shape shape) {
      if (has) shape.insert(shape.begin(), groups);
      return shape;
    };
    const auto array = [&](DType dtype, const Shape& shape) {
      Array made(dtype, shape);
      for (int64_t i = 0; i < made.bytes(); ++i) made.data()[i] = static_cast<uint8_t>(random_());
      return made;
    };
    const Shape shapes[] = {with_groups(masked, lhs),
                            with_groups(!contracted, rhs),
                            with_groups(masked, TileCounts(call.spec.lhs)),
                            with_groups(!contracted, TileCounts(call.spec.rhs)),
                            {groups},
                            with_groups(contracted || masked, OutShape(call.spec))};
    const DType types[] = {DType::kE4M3, DType::kE4M3, DType::kF32,
                           DType::kF32,  DType::kS32,  DType::kBF16};
    std::vector<Array> arrays;
    for (int i = 0; i < 6; ++i) arrays.push_back(array(types[i], shapes[i]));
    std::vector<Buffer> operands;
    for (int i = 0; i < 6; ++i) operands.push_back({types[i], shapes[i], arrays[i].data()});
    for (int64_t g = 0; g < groups; ++g) {
      if (wilder_.Below(3)) arrays[4].as<int32_t>()[g] = static_cast<int32_t>(wilder_.Below(9));
    }
    const std::vector<Buffer> results = {operands.back()};
    operands.pop_back();
    OwnThreads pool(Threads());
    grouped_ += RunRagged(call, operands, results, pool).ok();
  }

  int Report() const {
    std::printf(
        "  fuzz: %d specs accepted, %d computed, %d in groups, %d matrices quantized, %d "
        "failures\n",
        accepted_, computed_, grouped_, quantized_, failures);
    Expect(accepted_ > 100 && computed_ > 100 && quantized_ > 10 && grouped_ > 10,
           "hardly anything is accepted");
    return failures != 0;
  }

 private:
  // Every array null: fine only where there are no values.
  void RunWithoutData(const jaxfp8_scaled_dot_spec& spec, const std::string& name, bool taken) {
    jaxfp8_scaled_dot_buffers none = {};
    none.struct_size = wilder_.Below(50) ? sizeof(none) : wilder_.Below(200);
    const Message message(256);
    const int status =
        jaxfp8_cpu_scaled_dot(&spec, &none, Threads(), message.data(), message.size());
    ExpectAnswer(status, message, "call without data of " + name);
    Expect(status != JAXFP8_OK || taken, "not routed, but computed: " + name);
  }

  void RunWithData(const Wild& wild, const jaxfp8_scaled_dot_spec& spec, const std::string& name) {
    WildData data(wild, random_);
    const Message message(512);
    const std::string kernel = Told(spec);
    const uint64_t before = Calls::Of(IndexOf(kernel));
    const int status =
        jaxfp8_cpu_scaled_dot(&spec, &data.buffers(), Threads(), message.data(), message.size());
    Expect(status == JAXFP8_OK, "call of " + name + ": " + message.text());
    Expect(Calls::Of(IndexOf(kernel)) == before + 1, name + " is not computed by " + kernel);
    ++computed_;
  }

  // Seldom several: AddressSanitizer takes long to start one.
  int Threads() { return wilder_.Below(30) ? 1 : static_cast<int>(wilder_.Below(5)); }

  // The kernel that the route names.
  static std::string Told(const jaxfp8_scaled_dot_spec& spec) {
    char text[1 << 13];
    jaxfp8_cpu_route(&spec, text, sizeof text);
    for (char* line = std::strtok(text, "\n"); line; line = std::strtok(nullptr, "\n")) {
      if (!std::strchr(line, ':')) return line;
    }
    return "";
  }

  static int IndexOf(const std::string& kernel) {
    for (size_t i = 0; i < AllKernels().size(); ++i) {
      if (AllKernels()[i]->name == kernel) return static_cast<int>(i);
    }
    return -1;
  }

  Random random_;
  Wilder wilder_;
  int accepted_ = 0, computed_ = 0, grouped_ = 0, quantized_ = 0;
};

// Found by hand: sizes whose product is a multiple of 2^64, or that a loop would never end over.
void CheckKnown() {
  for (int64_t size : {int64_t{1} << 40, int64_t{1} << 62}) {
    Wild wild;
    wild.lhs = {"float32", {0, size, 64}, {1, 2}, {}, {1, 1, 3}, 1, 0};
    wild.rhs = {"int8", {0, size, 64}, {1, 2}, {}, {1, 1, 3}, 0, 0};
    const jaxfp8_scaled_dot_spec spec = wild.Spec();
    jaxfp8_scaled_dot_buffers none = {};
    none.struct_size = sizeof(none);
    const bool fits = size < kMaxBytes / 256;
    for (const bool route : {true, false}) {
      const Message message(256);
      const int status = route ? jaxfp8_cpu_route(&spec, message.data(), message.size())
                               : jaxfp8_cpu_scaled_dot(&spec, &none, 1, message.data(), 256);
      Expect((status == JAXFP8_OK) == fits, TextOf(wild) + ": " + message.text());
    }
  }
}

// Where a kernel is chosen by the scales, a route has none to look at.
void CheckRouteByScales() {
  Wild wild;
  wild.lhs = {"float32", {256, 1024}, {1}, {}, {256, 1024}, 0, 0};
  wild.rhs = {"float8_e4m3fn", {1024, 1024}, {0}, {}, {32, 1}, 1, 0};
  const jaxfp8_scaled_dot_spec spec = wild.Spec();
  const Message message(4096);
  const int status = jaxfp8_cpu_route(&spec, message.data(), message.size());
  Expect(status == JAXFP8_OK, "route by scales: " + message.text());
}

}  // namespace
}  // namespace jaxfp8::tests

int main(int count, char** arguments) {
  using namespace jaxfp8::tests;
  CheckKnown();
  CheckRouteByScales();
  return RunFuzz<Fuzz>(ReadOptions(count, arguments, 20000), 1);
}
