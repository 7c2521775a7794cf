// The XLA FFI handler `jaxfp8_ragged_dot`: groups of rows of lhs, each times an rhs of its own, or
// groups of K, each with an output of its own, by `sm90_gemm`.
//
//   operands    lhs        rhs        result
//               [M, K]     [G, N, K]  [M, N]     one group of rows after the other
//               [G, M, K]  [G, N, K]  [G, M, N]  each group has the first rows of its own
//               [M, K]     [N, K]     [G, M, N]  one group of K after the other
//               group_sizes int32 [G]. If `lhs_scale`, float32
//               [rows / lhs_tiles[0], K / lhs_tiles[1]], where rows are those of all groups. If
//               `rhs_scale`, float32 [G or 1, N / rhs_tiles[0], K / rhs_tiles[1]], of which there
//               is one beside groups of K
//   results     out: bfloat16, float16 or float32
//   attributes  lhs_scale, rhs_scale: bool; lhs_tiles, rhs_tiles: two i64 each
//               precision: "default", or "highest" without fast sums of FP8
//
// K is a multiple of 16: then operands are read where they lie, and no workspace is needed.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/buffer_taker.h"
#include "common/shapes.h"
#include "common/xla_call.h"
#include "cuda/bind.h"
#include "cuda/counters.h"
#include "cuda/device.h"
#include "cuda/kernels/sm90_gemm/operands.h"
#include "cuda/kernels/sm90_gemm/path.h"
#include "cuda/known_calls.h"
#include "cuda/plans.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kName = "jaxfp8_ragged_dot";

std::string Say(const std::string& what) { return "`" + std::string(kName) + "`: " + what; }

struct KnownRagged {
  std::shared_ptr<const Plan> plan;
  bool lhs_scale, rhs_scale;
};

// Never destroyed: a program may still run when the process ends.
KnownCalls<KnownRagged>& TheCalls() {
  static auto* calls = new KnownCalls<KnownRagged>;
  return *calls;
}

struct RaggedCall {
  Problem problem;
  Dims lhs_tiles, rhs_tiles;
};

std::string ReadScales(ffi::Dictionary attributes, RaggedCall& call) {
  std::string_view precision;
  Reader read(attributes, kName);
  read("lhs_scale", call.problem.lhs.scale);
  read("rhs_scale", call.problem.rhs.scale);
  read("lhs_tiles", call.lhs_tiles);
  read("rhs_tiles", call.rhs_tiles);
  read("precision", precision);
  if (!read.wrong().empty()) return read.wrong();
  if (precision != "default" && precision != "highest") {
    return Say("`precision` is `" + std::string(precision) + "`, not `default` or `highest`");
  }
  call.problem.highest = precision == "highest";
  for (const Dims tiles : {call.lhs_tiles, call.rhs_tiles}) {
    if (tiles.size() != 2 || std::min(tiles[0], tiles[1]) < 1) {
      return Say("`lhs_tiles` and `rhs_tiles` need two sizes each, of at least 1");
    }
  }
  return "";
}

// How operands of these ranks are grouped; `kNone`: not at all.
Grouping GroupingOf(size_t lhs_rank, size_t rhs_rank, size_t sizes_rank) {
  if (sizes_rank != 1) return Grouping::kNone;
  if (lhs_rank == 2 && rhs_rank == 3) return Grouping::kContiguous;
  if (lhs_rank == 3 && rhs_rank == 3) return Grouping::kMasked;
  if (lhs_rank == 2 && rhs_rank == 2) return Grouping::kContracted;
  return Grouping::kNone;
}

// The problem of operands of the right ranks, without scales.
std::string ReadShapes(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                       RaggedCall& call) {
  if (operands.size() < 3 || results.size() != 1) {
    return Say("it needs lhs, rhs and group_sizes, then scales, and one result");
  }
  const Buffer &lhs = operands[0], &rhs = operands[1], &sizes = operands[2];
  Problem& p = call.problem;
  p.grouping = GroupingOf(lhs.shape.size(), rhs.shape.size(), sizes.shape.size());
  if (p.grouping == Grouping::kNone) {
    return Say("`lhs` and `rhs` need two axes or three, and `group_sizes` one");
  }
  const bool contracted = p.grouping == Grouping::kContracted;
  const size_t axis = contracted ? 0 : 1;
  p.batch = contracted ? sizes.shape[0] : rhs.shape[0];
  p.columns = rhs.shape[axis], p.depth = rhs.shape[axis + 1];
  p.rows = lhs.shape[lhs.shape.size() - 2] * (p.grouping == Grouping::kMasked ? p.batch : 1);
  p.lhs.dtype = lhs.dtype, p.rhs.dtype = rhs.dtype;
  p.lhs.free = p.rhs.free = p.depth, p.lhs.depth = p.rhs.depth = 1;
  p.rhs.batch = contracted ? 0 : p.columns * p.depth;
  p.out = {results[0].dtype, contracted ? p.rows * p.columns : 0, p.columns, 1};
  if (p.depth % sm90::kOperandAlignment != 0) {
    return Say("the contracted axis has " + std::to_string(p.depth) +
               " values, but needs a multiple of " + std::to_string(sm90::kOperandAlignment));
  }
  if (!IsWideFloat(p.out.dtype)) return Say("`out` needs to be float32, bfloat16 or float16");
  return "";
}

// Where the scales lie, of which `groups` says how many the rhs has along its first axis.
void PlaceScales(RaggedCall& call, int64_t groups) {
  Problem& p = call.problem;
  const auto place = [&](Side& side, int64_t lines, Dims tiles, bool has_groups) {
    const int64_t down = TileCount(lines, tiles[0]), across = TileCount(p.depth, tiles[1]);
    side.tiles = {tiles[0], tiles[1], has_groups ? down * across : 0, down == 1 ? 0 : across,
                  across == 1 ? 0 : 1};
  };
  place(p.lhs, p.rows, call.lhs_tiles, false);
  place(p.rhs, p.columns, call.rhs_tiles, groups > 1);
}

// Checks all buffers against the shapes that those of lhs, rhs and sizes ask for.
std::string CheckBuffers(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                         RaggedCall& call) {
  using Shape = std::vector<int64_t>;
  const Problem& p = call.problem;
  const bool masked = p.grouping == Grouping::kMasked;
  const bool contracted = p.grouping == Grouping::kContracted;
  const int64_t rows = masked ? p.rows / std::max<int64_t>(p.batch, 1) : p.rows;
  const auto with_groups = [&](bool has, int64_t lines, int64_t last) {
    return has ? Shape{p.batch, lines, last} : Shape{lines, last};
  };
  const auto scales = [&](int64_t lines, Dims tiles) {
    return Shape{TileCount(lines, tiles[0]), TileCount(p.depth, tiles[1])};
  };
  const void* data = nullptr;
  BufferTaker operand(kName, operands), result(kName, results);
  operand("lhs", p.lhs.dtype, with_groups(masked, rows, p.depth), data);
  operand("rhs", p.rhs.dtype, with_groups(!contracted, p.columns, p.depth), data);
  operand("group_sizes", DType::kS32, {p.batch}, data);
  if (p.lhs.scale) operand("lhs_scale", DType::kF32, scales(p.rows, call.lhs_tiles), data);
  int64_t groups = 1;
  if (p.rhs.scale) {
    const Dims shape = operands.back().shape;
    if (!contracted && !shape.empty() && shape[0] == p.batch) groups = p.batch;
    const Shape of_one = scales(p.columns, call.rhs_tiles);
    operand("rhs_scale", DType::kF32, {groups, of_one[0], of_one[1]}, data);
  }
  result("out", p.out.dtype, with_groups(masked || contracted, rows, p.columns), data);
  operand.End("operands");
  result.End("results");
  PlaceScales(call, groups);
  return operand.wrong().empty() ? result.wrong() : operand.wrong();
}

// Checks a call, makes its plan, and keeps both under the key.
const KnownRagged* Check(const CallKey& key, ffi::Dictionary attributes,
                         const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                         std::string& wrong) {
  RaggedCall call;
  wrong = ReadScales(attributes, call);
  if (wrong.empty()) wrong = ReadShapes(operands, results, call);
  if (wrong.empty()) wrong = CheckBuffers(operands, results, call);
  if (!wrong.empty()) return nullptr;
  const RelaxedCapture relaxed;
  Device device;
  wrong = CurrentDevice(device);
  if (wrong.empty()) wrong = kSm90Gemm.why_not(call.problem, device);
  std::shared_ptr<const Plan> plan;
  if (wrong.empty()) plan = kSm90Gemm.plan(call.problem, device, 0, wrong);
  if (!plan) {
    wrong = Say(wrong);
    return nullptr;
  }
  return TheCalls().Keep(key.text(), {plan, call.problem.lhs.scale, call.problem.rhs.scale});
}

std::string Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  std::string wrong;
  const KnownRagged* known = TheCalls().FindOrCheck(attributes, operands, results, Check, wrong);
  if (!known) return wrong;
  Buffers buffers;
  buffers.lhs = operands[0].data, buffers.rhs = operands[1].data;
  buffers.group_sizes = static_cast<const int32_t*>(operands[2].data);
  size_t next = 3;
  if (known->lhs_scale) buffers.lhs_scale = static_cast<const float*>(operands[next++].data);
  if (known->rhs_scale) buffers.rhs_scale = static_cast<const float*>(operands[next].data);
  buffers.out = results[0].data;
  wrong = known->plan->Run(buffers, stream);
  if (!wrong.empty()) return Say(wrong);
  CountCall(kSm90Gemm);
  return "";
}

ffi::Error Execute(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  return AnswerOf(kName, [&] { return Call(stream, args, rets, attributes); });
}

}  // namespace
}  // namespace jaxfp8::cuda

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jaxfp8_ragged_dot(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_ragged_dot, jaxfp8::cuda::Execute, jaxfp8::cuda::BindAll(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop
