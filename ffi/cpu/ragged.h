// Products of groups: of rows of lhs, each group with an rhs of its own, or of positions of K, each
// with an output of its own. Each group is a scaled dot over slices of the operands.

#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "common/check.h"
#include "common/spec.h"
#include "common/status.h"
#include "cpu/pool.h"

namespace jaxfp8 {

// The axis in groups, by name: "rows" of lhs, "masked" (lhs has rows for each group, and the first
// ones count) or "contracted".
enum class RaggedKind : uint8_t { kRows, kMasked, kContracted };

struct RaggedCall {
  ScaledDotSpec spec;  // of one group, with all rows or all of K
  RaggedKind grouping = RaggedKind::kRows;
  std::string_view kernel;
};

Status ParseGrouping(std::string_view name, RaggedKind& to);

// Operands are those of the spec, then int32 group sizes. What each group has for itself has the
// groups as its first axis. Axes in groups come first. Rows of no group are zeros.
Status RunRagged(const RaggedCall& call, const std::vector<Buffer>& operands,
                 const std::vector<Buffer>& results, Pool& pool);

}  // namespace jaxfp8
