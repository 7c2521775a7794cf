// The XLA FFI handler `jaxfp8_ragged_dot`: groups of rows of lhs, each times an rhs of its own, or
// groups of K, each with an output of its own, by `sm90_gemm` or `sm80_w8a16`.
//
//   operands    lhs        rhs        result
//               [M, K]     [G, N, K]  [M, N]     one group of rows after the other
//               [G, M, K]  [G, N, K]  [G, M, N]  each group has the first rows of its own
//               [M, K]     [N, K]     [G, M, N]  one group of K after the other
//               group_sizes int32 [G]. If `lhs_scale`, float32
//               [rows / lhs_tiles[0], K / lhs_tiles[1]], where rows are those of all groups. If
//               `rhs_scale`, float32 [G or 1, N / rhs_tiles[0], K / rhs_tiles[1]], of which there
//               is one beside groups of K. If `rhs_zero_point`, int32 of the shape of rhs_scale
//   results     out: bfloat16, float16 or float32
//   attributes  lhs_scale, rhs_scale, rhs_zero_point: bool; lhs_tiles, rhs_tiles: two i64 each
//               rhs_mn_major: bool, rhs is [G, K, N], and its factors [G or 1, K, N] likewise
//               precision: "default", or "highest" without fast sums of FP8
//               kernel: the path to take, "" for the best
//
// K is a multiple of 16 beside two 8-bit operands: then operands are read where they lie, and no
// workspace is needed.

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
#include "cuda/device.h"
#include "cuda/kernels/sm90/operands.h"
#include "cuda/known_calls.h"
#include "cuda/plans.h"
#include "cuda/route.h"

namespace jaxfp8::cuda {
namespace {

struct KnownRagged {
  Planned planned;
};

struct RaggedCall {
  Problem problem;
  Dims lhs_tiles, rhs_tiles;
  bool mn_major = false;  // rhs
  std::string_view kernel;
};

Status ReadAttributes(ffi::Dictionary attributes, RaggedCall& call) {
  std::string_view precision;
  Reader read(attributes);
  read("lhs_scale", call.problem.lhs.scale);
  read("rhs_scale", call.problem.rhs.scale);
  read("rhs_zero_point", call.problem.rhs.zero_point);
  read("rhs_mn_major", call.mn_major);
  read("lhs_tiles", call.lhs_tiles);
  read("rhs_tiles", call.rhs_tiles);
  read("precision", precision);
  read("kernel", call.kernel);
  JAXFP8_RETURN_IF_ERROR(read.status());
  if (precision != "default" && precision != "highest") {
    return "`precision` is `" + std::string(precision) + "`, not `default` or `highest`";
  }
  call.problem.highest = precision == "highest";
  for (const Dims tiles : {call.lhs_tiles, call.rhs_tiles}) {
    if (tiles.size() != 2 || std::min(tiles[0], tiles[1]) < 1) {
      return "`lhs_tiles` and `rhs_tiles` need two sizes each, of at least 1";
    }
  }
  return {};
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
Status ReadShapes(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                  RaggedCall& call) {
  if (operands.size() < 3 || results.size() != 1) {
    return "it needs lhs, rhs and group_sizes, then scales, and one result";
  }
  const Buffer &lhs = operands[0], &rhs = operands[1], &sizes = operands[2];
  Problem& p = call.problem;
  p.grouping = GroupingOf(lhs.shape.size(), rhs.shape.size(), sizes.shape.size());
  if (p.grouping == Grouping::kNone) {
    return "`lhs` and `rhs` need two axes or three, and `group_sizes` one";
  }
  const bool contracted = p.grouping == Grouping::kContracted;
  const size_t axis = contracted ? 0 : 1;
  p.batch = contracted ? sizes.shape[0] : rhs.shape[0];
  p.columns = rhs.shape[axis + (call.mn_major ? 1 : 0)];
  p.depth = rhs.shape[axis + (call.mn_major ? 0 : 1)];
  p.rows = lhs.shape[lhs.shape.size() - 2] * (p.grouping == Grouping::kMasked ? p.batch : 1);
  p.lhs.dtype = lhs.dtype, p.rhs.dtype = rhs.dtype;
  p.lhs.free_stride = p.rhs.free_stride = p.depth, p.lhs.depth_stride = p.rhs.depth_stride = 1;
  if (call.mn_major) p.rhs.free_stride = 1, p.rhs.depth_stride = p.columns;
  p.rhs.batch_stride = contracted ? 0 : p.columns * p.depth;
  p.out = {.dtype = results[0].dtype,
           .batch_stride = contracted ? p.rows * p.columns : 0,
           .row_stride = p.columns,
           .column_stride = 1};
  if (!sm90::IsMixed(p) && p.depth % sm90::kOperandAlignment != 0) {
    return "the contracted axis has " + std::to_string(p.depth) +
           " values, but needs a multiple of " + std::to_string(sm90::kOperandAlignment);
  }
  if (!IsWideFloat(p.out.dtype)) return "`out` needs to be float32, bfloat16 or float16";
  return {};
}

// Where the scales lie, of which `groups` says how many the rhs has along its first axis.
void PlaceScales(RaggedCall& call, int64_t groups) {
  Problem& p = call.problem;
  const auto place = [&](int64_t lines, Dims tiles, bool has_groups, bool mn_major) {
    const int64_t down = TileCount(lines, tiles[0]), across = TileCount(p.depth, tiles[1]);
    return Tiles{.tile_free = tiles[0],
                 .tile_depth = tiles[1],
                 .batch_stride = has_groups ? down * across : 0,
                 .free_stride = down == 1  ? 0
                                : mn_major ? 1
                                           : across,
                 .depth_stride = across == 1 ? 0
                                 : mn_major  ? down
                                             : 1};
  };
  p.lhs.tiles = place(p.rows, call.lhs_tiles, /*has_groups=*/false, /*mn_major=*/false);
  p.rhs.tiles = place(p.columns, call.rhs_tiles, /*has_groups=*/groups > 1, call.mn_major);
}

// Checks all buffers against the shapes that those of lhs, rhs and sizes ask for.
Status CheckBuffers(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                    RaggedCall& call) {
  using Shape = std::vector<int64_t>;
  const Problem& p = call.problem;
  const bool masked = p.grouping == Grouping::kMasked;
  const bool contracted = p.grouping == Grouping::kContracted;
  const int64_t rows = masked ? p.rows / std::max<int64_t>(p.batch, 1) : p.rows;
  const auto with_groups = [&](bool has, int64_t lines, int64_t last) {
    return has ? Shape{p.batch, lines, last} : Shape{lines, last};
  };
  const auto of_rhs = [&](Shape shape) {
    if (call.mn_major) std::swap(shape[shape.size() - 2], shape.back());
    return shape;
  };
  const auto scales = [&](int64_t lines, Dims tiles) {
    return Shape{TileCount(lines, tiles[0]), TileCount(p.depth, tiles[1])};
  };
  const void* data = nullptr;
  BufferTaker operand(operands), result(results);
  operand("lhs", p.lhs.dtype, with_groups(masked, rows, p.depth), data);
  operand("rhs", p.rhs.dtype, of_rhs(with_groups(!contracted, p.columns, p.depth)), data);
  operand("group_sizes", DType::kS32, {p.batch}, data);
  if (p.lhs.scale) operand("lhs_scale", DType::kF32, scales(p.rows, call.lhs_tiles), data);
  const Dims last = operands.back().shape;  // of a factor of rhs, if it has one
  const int64_t groups = !contracted && !last.empty() && last[0] == p.batch ? p.batch : 1;
  const Shape of_one = scales(p.columns, call.rhs_tiles);
  const Shape factor = of_rhs({groups, of_one[0], of_one[1]});
  if (p.rhs.scale) operand("rhs_scale", DType::kF32, factor, data);
  if (p.rhs.zero_point) operand("rhs_zero_point", DType::kS32, factor, data);
  result("out", p.out.dtype, with_groups(masked || contracted, rows, p.columns), data);
  PlaceScales(call, groups);
  JAXFP8_RETURN_IF_ERROR(operand.End("operands"));
  return result.End("results");
}

// Checks a call and makes its plan.
Status Check(ffi::Dictionary attributes, const std::vector<Buffer>& operands,
             const std::vector<Buffer>& results, KnownRagged& known) {
  RaggedCall call;
  JAXFP8_RETURN_IF_ERROR(ReadAttributes(attributes, call));
  JAXFP8_RETURN_IF_ERROR(ReadShapes(operands, results, call));
  JAXFP8_RETURN_IF_ERROR(CheckBuffers(operands, results, call));
  const RelaxedCapture relaxed;
  Device device;
  JAXFP8_RETURN_IF_ERROR(CurrentDevice(device));
  known.planned.problem = call.problem;
  return PlanProblem(device, call.kernel, 0, known.planned);
}

Status Call(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
            ffi::Dictionary attributes) {
  const std::vector<Buffer> operands = Describe(args), results = Describe(rets);
  const KnownRagged* known = nullptr;
  JAXFP8_RETURN_IF_ERROR(FindCall(attributes, operands, results, Check, known));
  const Planned& planned = known->planned;
  const Problem& p = planned.problem;
  Buffers buffers;
  buffers.lhs = operands[0].data, buffers.rhs = operands[1].data;
  buffers.group_sizes = static_cast<const int32_t*>(operands[2].data);
  size_t next = 3;
  if (p.lhs.scale) buffers.lhs_scale = static_cast<const float*>(operands[next++].data);
  if (p.rhs.scale) buffers.rhs_scale = static_cast<const float*>(operands[next++].data);
  if (p.rhs.zero_point) {
    buffers.rhs_zero_point = static_cast<const int32_t*>(operands[next].data);
  }
  buffers.out = results[0].data;
  JAXFP8_RETURN_IF_ERROR(planned.plan->Run(buffers, stream));
  Calls::Count(*planned.path);
  return {};
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_ragged_dot, jaxfp8::cuda::Call);
