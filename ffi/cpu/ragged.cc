#include "cpu/ragged.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "common/shapes.h"
#include "common/sizes.h"
#include "cpu/run.h"

namespace jaxfp8 {
namespace {

// An array of the call, and the bytes from one group's to the next one's, and from a position of
// the axis in groups to the next; 0 where they share what it holds.
struct GroupedArray {
  Slot slot;
  int64_t group_bytes, position_bytes;
};

bool IsLhs(Slot slot) {
  return slot == &Buffers::lhs || slot == &Buffers::lhs_scale || slot == &Buffers::lhs_zero_point;
}

// Whether it is the output, or broadcast over the output.
bool IsOutput(Slot slot) {
  return slot == &Buffers::out || slot == &Buffers::residual || slot == &Buffers::out_scale;
}

bool HasGroups(Slot slot, RaggedKind grouping) {
  if (slot == &Buffers::amax) return false;
  if (IsOutput(slot)) return grouping != RaggedKind::kRows;
  return IsLhs(slot) ? grouping == RaggedKind::kMasked : grouping != RaggedKind::kContracted;
}

// Whether the first axis of a group's array may be the axis in groups.
bool MayHavePositions(Slot slot, RaggedKind grouping) {
  if (slot == &Buffers::amax || slot == &Buffers::bias) return false;
  const bool contracted = grouping == RaggedKind::kContracted;
  return IsOutput(slot) ? !contracted : contracted || IsLhs(slot);
}

Status CheckSide(const OperandSpec& side, const char* name, int64_t contracting, bool starts) {
  if (side.shape.size() != 2 || side.contracting.size() != 1 || !side.batch.empty()) {
    return "`" + std::string(name) + "` needs two axes in each group";
  }
  if (contracting >= 0 && side.contracting[0] != contracting) {
    return "`" + std::string(name) + "` needs the axis in groups first";
  }
  if (starts && side.tiles[0] != 1 && side.tiles[0] < side.shape[0]) {
    return "`" + std::string(name) + "_tiles` needs 1, or all, along the axis in groups";
  }
  return {};
}

Status CheckGroups(const RaggedCall& call) {
  const ScaledDotSpec& spec = call.spec;
  const EpilogueSpec& epilogue = spec.epilogue;
  if (spec.lhs.sums || spec.rhs.sums) return "groups have no sums";
  const bool contracted = call.grouping == RaggedKind::kContracted;
  if (contracted && (epilogue.has_residual || epilogue.has_bias || epilogue.has_out_scale ||
                     epilogue.has_amax || epilogue.activation != "none")) {
    return "groups along the contracted axis have no epilogue";
  }
  JAXFP8_RETURN_IF_ERROR(
      CheckSide(spec.lhs, "lhs", contracted ? 0 : 1, call.grouping != RaggedKind::kMasked));
  JAXFP8_RETURN_IF_ERROR(CheckSide(spec.rhs, "rhs", contracted ? 0 : -1, contracted));
  if (epilogue.has_bias && epilogue.bias[0] != 1) {
    return "attribute `bias` is " + ShapeText(epilogue.bias) + ", but needs one row for a group";
  }
  if (epilogue.has_amax && CountOf(epilogue.amax) != 1) {
    return "attribute `amax` is " + ShapeText(epilogue.amax) + ", but needs (1, 1) in groups";
  }
  return {};
}

// Takes the axis of groups off the arrays that have it.
Status TakeGroups(const RaggedCall& call, int64_t groups, const std::vector<Slot>& slots,
                  std::vector<Buffer>& buffers, std::vector<GroupedArray>& arrays) {
  const int64_t positions = call.spec.lhs.shape[0];
  for (size_t i = 0; i < std::min(slots.size(), buffers.size()); ++i) {
    Dims& shape = buffers[i].shape;
    const bool has_groups = HasGroups(slots[i], call.grouping);
    if (has_groups && (shape.empty() || shape[0] != groups)) {
      return "array " + std::to_string(i) + " needs " + std::to_string(groups) +
             " groups along its first axis";
    }
    if (has_groups) shape = shape.subspan(1);
    const int64_t bytes = CountOf(shape) * SizeOf(buffers[i].dtype);
    const bool has_positions = MayHavePositions(slots[i], call.grouping) && positions > 0 &&
                               !shape.empty() && shape[0] == positions;
    arrays.push_back({slots[i], has_groups ? bytes : 0, has_positions ? bytes / positions : 0});
  }
  return {};
}

// The shape of a part of an array that broadcasts over the output: `size` of its positions.
std::array<int64_t, 2> PartOf(Dims plane, int64_t positions, int64_t size) {
  return {plane[0] == positions ? size : 1, plane[1]};
}

class GroupedCall {
 public:
  GroupedCall(const RaggedCall& call, const Buffers& buffers, std::vector<GroupedArray> arrays,
              Pool& pool)
      : call_(call), buffers_(buffers), arrays_(std::move(arrays)), pool_(pool) {
    if (buffers_.amax != nullptr) *Amax() = 0;
  }

  // The scaled dot of `size` positions from `start` on.
  Status Multiply(int64_t group, int64_t start, int64_t size) {
    return Run(call_.spec, group, start, size);
  }

  // The output from a position on: the epilogue of sums of nothing, without a bias.
  Status Finish(int64_t group, int64_t start) {
    const int64_t size = call_.spec.lhs.shape[0] - start;
    const EpilogueSpec& epilogue = call_.spec.epilogue;
    const bool zeros = !epilogue.has_residual && !epilogue.has_out_scale;  // 0 / NaN is NaN
    if (zeros || size == 0) return Clear(group, start, size), Status{};
    ScaledDotSpec spec = call_.spec;
    const std::array lhs = {size, int64_t{0}};
    std::array rhs = {spec.rhs.shape[0], spec.rhs.shape[1]};
    rhs[spec.rhs.contracting[0]] = 0;
    spec.lhs.shape = lhs;
    spec.rhs.shape = rhs;
    spec.lhs.scale = spec.lhs.zero_point = spec.rhs.scale = spec.rhs.zero_point = false;
    spec.epilogue.has_bias = false;
    return Run(spec, group, start, size);
  }

  // Zeros in the output of `size` positions, or in that of a group along the contracted axis.
  void Clear(int64_t group, int64_t start, int64_t size) {
    const GroupedArray& out =
        *std::find_if(arrays_.begin(), arrays_.end(),
                      [](const GroupedArray& one) { return one.slot == &Buffers::out; });
    const int64_t bytes =
        call_.grouping == RaggedKind::kContracted ? out.group_bytes : size * out.position_bytes;
    if (bytes > 0) std::memset(At(out, group, start), 0, bytes);
  }

 private:
  Status Run(ScaledDotSpec spec, int64_t group, int64_t start, int64_t size) {
    const int64_t positions = call_.spec.lhs.shape[0];
    const std::array lhs = {size, spec.lhs.shape[1]}, rhs = {size, spec.rhs.shape[1]};
    spec.lhs.shape = lhs;
    if (call_.grouping == RaggedKind::kContracted) spec.rhs.shape = rhs;
    std::array<int64_t, 2> residual, out_scale;
    for (const auto& [has, plane, part] :
         {std::tuple(spec.epilogue.has_residual, &spec.epilogue.residual, &residual),
          std::tuple(spec.epilogue.has_out_scale, &spec.epilogue.out_scale, &out_scale)}) {
      if (has) *plane = *part = PartOf(*plane, positions, size);
    }
    Buffers own = buffers_;
    for (const GroupedArray& array : arrays_) own.*array.slot = At(array, group, start);
    float amax = 0;
    if (own.amax != nullptr) own.amax = &amax;
    JAXFP8_RETURN_IF_ERROR(jaxfp8::Run(spec, own, call_.kernel, pool_));
    if (own.amax != nullptr && !std::isnan(*Amax()) && !(amax <= *Amax())) *Amax() = amax;
    return {};
  }

  float* Amax() const { return static_cast<float*>(buffers_.amax); }

  void* At(const GroupedArray& array, int64_t group, int64_t start) const {
    return static_cast<char*>(buffers_.*array.slot) + group * array.group_bytes +
           start * array.position_bytes;
  }

  const RaggedCall& call_;
  const Buffers& buffers_;
  const std::vector<GroupedArray> arrays_;
  Pool& pool_;
};

}  // namespace

Status ParseGrouping(std::string_view name, RaggedKind& to) {
  constexpr std::string_view kNames[] = {"rows", "masked", "contracted"};
  const auto at = std::find(std::begin(kNames), std::end(kNames), name);
  if (at == std::end(kNames)) {
    return "attribute `grouping` is `" + std::string(name) +
           "`, but needs to be one of: rows, masked, contracted";
  }
  to = static_cast<RaggedKind>(at - std::begin(kNames));
  return {};
}

Status RunRagged(const RaggedCall& call, const std::vector<Buffer>& operands,
                 const std::vector<Buffer>& results, Pool& pool) {
  JAXFP8_RETURN_IF_ERROR(CheckGroups(call));
  if (operands.empty() || operands.back().dtype != DType::kS32 ||
      operands.back().shape.size() != 1) {
    return "the last operand needs to be the group sizes: a vector of int32";
  }
  const int64_t groups = operands.back().shape[0];
  std::vector<Buffer> given(operands.begin(), operands.end() - 1), made = results;
  std::vector<GroupedArray> arrays;
  JAXFP8_RETURN_IF_ERROR(TakeGroups(call, groups, OperandSlots(call.spec), given, arrays));
  JAXFP8_RETURN_IF_ERROR(TakeGroups(call, groups, ResultSlots(call.spec), made, arrays));
  Buffers buffers;
  JAXFP8_RETURN_IF_ERROR(BindBuffers(call.spec, given, made, Accepts::kAsStored, buffers));
  GroupedCall all(call, buffers, arrays, pool);
  const auto* sizes = static_cast<const int32_t*>(operands.back().data);
  const int64_t positions = call.spec.lhs.shape[0];
  int64_t start = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (call.grouping == RaggedKind::kMasked) start = 0;
    const int64_t size = std::clamp<int64_t>(sizes[g], 0, positions - start);
    if (size > 0) JAXFP8_RETURN_IF_ERROR(all.Multiply(g, start, size));
    start += size;
    if (call.grouping == RaggedKind::kMasked) JAXFP8_RETURN_IF_ERROR(all.Finish(g, start));
    if (call.grouping == RaggedKind::kContracted && size == 0) all.Clear(g, start, 0);
  }
  return call.grouping == RaggedKind::kRows ? all.Finish(0, start) : Status{};
}

}  // namespace jaxfp8
