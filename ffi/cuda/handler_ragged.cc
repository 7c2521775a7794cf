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
//               For groups of rows, `rows` those of all groups, if the attribute says so:
//               `residual`, a wide float [rows or 1, N or 1]; `bias`, float32 [G or 1, N or 1];
//               `out_scale`, float32 [rows or 1, N or 1]
//   results     out, of `out_dtype`. If `amax`, float32 [1, 1]
//   attributes  lhs_scale, rhs_scale, rhs_zero_point: bool; lhs_tiles, rhs_tiles: two i64 each
//               residual, bias, out_scale, amax: bool; activation, out_dtype: string
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

// The operands and the result of the epilogue that a call has.
struct Given {
  bool residual = false, bias = false, out_scale = false, amax = false;
};

struct KnownRagged {
  Planned planned;
};

struct RaggedCall {
  Problem problem;
  Dims lhs_tiles, rhs_tiles;
  bool mn_major = false;  // rhs
  Given given;
  std::string_view kernel;
};

Status ReadEpilogue(Reader& read, RaggedCall& call) {
  std::string_view activation, out_dtype;
  read("residual", call.given.residual);
  read("bias", call.given.bias);
  read("out_scale", call.given.out_scale);
  read("amax", call.given.amax);
  read("activation", activation);
  read("out_dtype", out_dtype);
  JAXFP8_RETURN_IF_ERROR(read.status());
  call.problem.activation = ParseActivation(activation);
  if (call.problem.activation == Activation::kUnknown) {
    return "`activation` is `" + std::string(activation) + "`, but needs to be one of " +
           std::string(kActivationNames);
  }
  const DType out = call.problem.out.dtype = ParseDType(out_dtype);
  if (call.given.out_scale ? !IsEightBit(out) : !IsWideFloat(out)) {
    return "`out_dtype` is `" + std::string(out_dtype) +
           "`, but needs to be float32, bfloat16 or float16, or 8 bits beside `out_scale`";
  }
  return {};
}

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
  JAXFP8_RETURN_IF_ERROR(ReadEpilogue(read, call));
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
  if (operands.size() < 3 || results.empty()) {
    return "it needs lhs, rhs and group_sizes, then scales, and a result";
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
  p.out = {.dtype = p.out.dtype,
           .batch_stride = contracted ? p.rows * p.columns : 0,
           .row_stride = p.columns,
           .column_stride = 1};
  if (!sm90::IsMixed(p) && p.depth % sm90::kOperandAlignment != 0) {
    return "the contracted axis has " + std::to_string(p.depth) +
           " values, but needs a multiple of " + std::to_string(sm90::kOperandAlignment);
  }
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

// Takes an array of the epilogue, of all or one of so many rows, and of the columns; the plane says
// where its values lie.
void TakePlane(BufferTaker& take, const char* name, DType dtype, int64_t rows, int64_t columns,
               Plane& plane) {
  const Dims given = take.NextShape();
  const auto all_or_one = [&](size_t axis, int64_t all) {
    return given.size() == 2 && given[axis] == 1 ? 1 : all;
  };
  const int64_t down = all_or_one(0, rows), across = all_or_one(1, columns);
  const void* data = nullptr;
  take(name, dtype, {down, across}, data);
  plane = {
      .dtype = dtype, .row_stride = down == 1 ? 0 : across, .column_stride = across == 1 ? 0 : 1};
}

// Takes the operands of the epilogue in their order.
void TakeEpilogue(BufferTaker& operand, RaggedCall& call) {
  Problem& p = call.problem;
  if (call.given.residual) {
    const DType type = operand.NextType();
    TakePlane(operand, "residual", IsWideFloat(type) ? type : DType::kF32, p.rows, p.columns,
              p.residual);
  }
  if (call.given.bias) {
    Plane& bias = p.bias;
    TakePlane(operand, "bias", DType::kF32, p.batch, p.columns, bias);
    // Rows of the array are groups. One group may have one row.
    bias.batch_stride = bias.row_stride, bias.row_stride = 0;
  }
  if (call.given.out_scale) {
    TakePlane(operand, "out_scale", DType::kF32, p.rows, p.columns, p.out_scale);
  }
}

// Checks all buffers against the shapes that those of lhs, rhs and sizes ask for.
Status CheckBuffers(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                    RaggedCall& call) {
  using Shape = std::vector<int64_t>;
  Problem& p = call.problem;
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
  const Dims last = operand.NextShape();  // of a factor of rhs, if it has one
  const int64_t groups = !contracted && !last.empty() && last[0] == p.batch ? p.batch : 1;
  const Shape of_one = scales(p.columns, call.rhs_tiles);
  const Shape factor = of_rhs({groups, of_one[0], of_one[1]});
  if (p.rhs.scale) operand("rhs_scale", DType::kF32, factor, data);
  if (p.rhs.zero_point) operand("rhs_zero_point", DType::kS32, factor, data);
  TakeEpilogue(operand, call);
  result("out", p.out.dtype, with_groups(masked || contracted, rows, p.columns), data);
  if (call.given.amax) {
    result("amax", DType::kF32, {1, 1}, data);
    p.amax.dtype = DType::kF32;
  }
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
    buffers.rhs_zero_point = static_cast<const int32_t*>(operands[next++].data);
  }
  if (p.residual) buffers.residual = operands[next++].data;
  if (p.bias) buffers.bias = static_cast<const float*>(operands[next++].data);
  if (p.out_scale) buffers.out_scale = static_cast<const float*>(operands[next].data);
  buffers.out = results[0].data;
  if (p.amax) buffers.amax = static_cast<float*>(results[1].data);
  JAXFP8_RETURN_IF_ERROR(planned.plan->Run(buffers, stream));
  Calls::Count(*planned.path);
  return {};
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_CUDA_HANDLER(jaxfp8_ragged_dot, jaxfp8::cuda::Call);
