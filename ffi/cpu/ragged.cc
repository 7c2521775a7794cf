#include "cpu/ragged.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
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

bool HasGroups(Slot slot, RaggedKind grouping) {
  if (slot == &Buffers::out) return grouping != RaggedKind::kRows;
  return IsLhs(slot) ? grouping == RaggedKind::kMasked : grouping != RaggedKind::kContracted;
}

// Whether the first axis of a group's array is the axis in groups.
bool HasPositions(Slot slot, RaggedKind grouping) {
  const bool contracted = grouping == RaggedKind::kContracted;
  if (slot == &Buffers::out) return !contracted;
  return contracted || IsLhs(slot);
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
  if (epilogue.has_residual || epilogue.has_bias || epilogue.has_out_scale || epilogue.has_amax ||
      spec.lhs.sums || spec.rhs.sums) {
    return "groups have no residual, bias, out_scale, amax or sums";
  }
  const bool contracted = call.grouping == RaggedKind::kContracted;
  JAXFP8_RETURN_IF_ERROR(
      CheckSide(spec.lhs, "lhs", contracted ? 0 : 1, call.grouping != RaggedKind::kMasked));
  return CheckSide(spec.rhs, "rhs", contracted ? 0 : -1, contracted);
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
    const bool has_positions = HasPositions(slots[i], call.grouping) && positions > 0 &&
                               !shape.empty() && shape[0] == positions;
    arrays.push_back({slots[i], has_groups ? bytes : 0, has_positions ? bytes / positions : 0});
  }
  return {};
}

class GroupedCall {
 public:
  GroupedCall(const RaggedCall& call, const Buffers& buffers, std::vector<GroupedArray> arrays,
              Pool& pool)
      : call_(call), buffers_(buffers), arrays_(std::move(arrays)), pool_(pool) {}

  // The scaled dot of `size` positions from `start` on.
  Status Multiply(int64_t group, int64_t start, int64_t size) {
    ScaledDotSpec spec = call_.spec;
    const std::array lhs = {size, spec.lhs.shape[1]}, rhs = {size, spec.rhs.shape[1]};
    spec.lhs.shape = lhs;
    if (call_.grouping == RaggedKind::kContracted) spec.rhs.shape = rhs;
    Buffers own = buffers_;
    for (const GroupedArray& array : arrays_) own.*array.slot = At(array, group, start);
    return Run(spec, own, call_.kernel, pool_);
  }

  // Zeros in the output from a position on.
  void Clear(int64_t group, int64_t start) {
    const GroupedArray& out = arrays_.back();
    const int64_t bytes = call_.grouping == RaggedKind::kContracted
                              ? out.group_bytes
                              : (call_.spec.lhs.shape[0] - start) * out.position_bytes;
    if (bytes > 0) std::memset(At(out, group, start), 0, bytes);
  }

 private:
  void* At(const GroupedArray& array, int64_t group, int64_t start) const {
    return static_cast<char*>(buffers_.*array.slot) + group * array.group_bytes +
           start * array.position_bytes;
  }

  const RaggedCall& call_;
  const Buffers& buffers_;
  const std::vector<GroupedArray> arrays_;  // the output last
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
    const bool empty = call.grouping == RaggedKind::kContracted && size == 0;
    if (call.grouping == RaggedKind::kMasked || empty) all.Clear(g, start);
  }
  if (call.grouping == RaggedKind::kRows) all.Clear(0, start);
  return {};
}

}  // namespace jaxfp8
