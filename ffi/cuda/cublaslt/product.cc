#include <algorithm>
#include <map>

#include "cuda/cublaslt/matmul.h"
#include "cuda/cublaslt/paths.h"
#include "cuda/cublaslt/pieces.h"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/pack/pack.h"

namespace jaxfp8::cuda {
namespace {

const char* Bytes(const void* from, int64_t elements, DType type) {
  return static_cast<const char*>(from) + elements * SizeOf(type);
}

// A side with its buffers: both sides share their code.
struct BoundSide {
  const Side& side;
  const SideLayout& layout;
  DType type;
  const void* values;
  const float* scale;
  const int32_t *zero_point, *sums;
  size_t packed_at, line_sums_at, scale_at;
};

char* At(const Buffers& buffers, size_t offset) {
  return static_cast<char*>(buffers.workspace) + offset;
}

cudaDataType_t LibraryType(DType type) {
#define JAXFP8_TYPE(type, name, xla, cuda) \
  case DType::k##type:                     \
    return CUDA_R_##cuda;
  switch (type) {
    JAXFP8_DTYPES(JAXFP8_TYPE)
    default:
      return CUDA_R_32F;
  }
#undef JAXFP8_TYPE
}

cublasLtMatmulMatrixScale_t LibraryMode(Scaling scaling, const SideLayout& side) {
  switch (scaling) {
    case Scaling::kOuterVectors:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Scaling::kBlocks:
      return side.square_blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    default:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

// The call for a piece: sizes, types, pitches and scale modes.
MatmulShape ShapeOf(const Problem& problem, const Layout& l, const PieceSizes& sizes) {
  const auto [batches, piece_rows, piece_columns, depth] = sizes;
  const int64_t rows = l.Padded(piece_rows), columns = l.Padded(piece_columns);
  MatmulShape shape;
  shape.a = LibraryType(l.types.rhs);
  shape.b = LibraryType(l.types.lhs);
  shape.d = LibraryType(l.writes_output ? problem.out.dtype : l.types.accumulator);
  shape.m = columns;
  shape.n = rows;
  shape.k = depth;
  shape.lda = l.rhs.pitch;
  shape.ldb = l.lhs.pitch;
  shape.ldd = l.writes_output ? problem.columns : Layout::AccumulatorPitch(columns);
  shape.plain_a = l.rhs.mn_major;
  shape.transposed_b = l.lhs.mn_major;
  shape.batch = batches;
  shape.batch_a = l.rhs.packed ? columns * l.rhs.pitch : l.rhs.batch_stride;
  shape.batch_b = l.lhs.packed ? rows * l.lhs.pitch : l.lhs.batch_stride;
  shape.batch_d = l.writes_output ? problem.out.batch_stride : rows * shape.ldd;
  shape.add_c = l.writes_output && problem.residual;
  shape.relu = l.writes_output && problem.activation == Activation::kRelu;
  const Scaling scaling = l.attempt.scaling;
  // Vector and block modes need a scale on both sides. A missing scale is 1.
  const bool both = scaling == Scaling::kOuterVectors || scaling == Scaling::kBlocks;
  shape.scale_a = both || (scaling == Scaling::kScalar && problem.rhs.scale);
  shape.scale_b = both || (scaling == Scaling::kScalar && problem.lhs.scale);
  shape.scale_d = l.quantizes_output && problem.out_scale;
  shape.amax_d = l.quantizes_output && problem.amax;
  shape.mode_a = LibraryMode(scaling, l.rhs);
  shape.mode_b = LibraryMode(scaling, l.lhs);
  // With block scales the library adds up in float32 every 128 of K. There is no fast mode.
  shape.fast = IsFloat8(l.types.lhs) && !problem.highest && scaling != Scaling::kBlocks;
  return shape;
}

class ProductPlan : public Plan {
 public:
  ProductPlan(const Problem& problem, const Layout& layout) : problem_(problem), layout_(layout) {}

  // Plans one library call for each different size of a piece.
  Status MakeMatmuls(const Device& device) {
    for (const PieceSizes& sizes : DifferentSizes(problem_, layout_)) {
      JAXFP8_RETURN_IF_ERROR(Matmul::Make(device, ShapeOf(problem_, layout_, sizes),
                                          layout_.offsets.library_bytes, matmuls_[sizes]));
    }
    return {};
  }

  Status Run(const Buffers& buffers, cudaStream_t stream) const override {
    JAXFP8_RETURN_IF_ERROR(WhyNotWorkspace(buffers.workspace_bytes, layout_.offsets.end));
    JAXFP8_RETURN_IF_ERROR(ClearAmax(problem_, buffers, stream));
    JAXFP8_RETURN_IF_ERROR(ComputeReciprocal(buffers, stream));
    return ForEachPiece(problem_, layout_,
                        [&](const Piece& piece) { return RunPiece(piece, buffers, stream); });
  }

 private:
  bool ByLibrary() const { return layout_.attempt.scaling != Scaling::kEpilogue; }

  // The place of the reciprocal of out_scale.
  float* OutScaleReciprocal(const Buffers& buffers) const {
    return reinterpret_cast<float*>(At(buffers, layout_.offsets.reciprocal));
  }

  BoundSide Left(const Buffers& buffers) const {
    const WorkspaceOffsets& p = layout_.offsets;
    return {problem_.lhs,      layout_.lhs,
            layout_.types.lhs, buffers.lhs,
            buffers.lhs_scale, buffers.lhs_zero_point,
            buffers.lhs_sums,  p.lhs,
            p.lhs_line_sums,   p.lhs_scale};
  }

  BoundSide Right(const Buffers& buffers) const {
    const WorkspaceOffsets& p = layout_.offsets;
    return {problem_.rhs,      layout_.rhs,
            layout_.types.rhs, buffers.rhs,
            buffers.rhs_scale, buffers.rhs_zero_point,
            buffers.rhs_sums,  p.rhs,
            p.rhs_line_sums,   p.rhs_scale};
  }

  Status ComputeReciprocal(const Buffers& buffers, cudaStream_t stream) const {
    const bool divides = layout_.quantizes_output && problem_.out_scale;
    return divides ? LaunchReciprocal(buffers.out_scale, OutScaleReciprocal(buffers), stream)
                   : Status();
  }

  Status RunPiece(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const {
    const int64_t depth = problem_.depth;
    // A packed side serves until the next piece along that side. Line sums belong to one piece of
    // K.
    const bool first_depth = piece.start == 0;
    const bool whole_rows = layout_.piece_shape.rows >= problem_.rows;
    const bool new_rows = first_depth && (!whole_rows || piece.column == 0);
    const bool new_columns = first_depth && piece.row == 0;
    const LineRange rows{piece.batch, piece.batches, piece.row, piece.rows, depth};
    const LineRange columns{piece.batch, piece.batches, piece.column, piece.columns, depth};
    if (new_rows) JAXFP8_RETURN_IF_ERROR(PackSide(Left(buffers), rows, buffers, stream));
    if (new_columns) JAXFP8_RETURN_IF_ERROR(PackSide(Right(buffers), columns, buffers, stream));
    if (new_rows || layout_.splits_depth) {
      JAXFP8_RETURN_IF_ERROR(SumLines(Left(buffers), rows, piece, buffers, stream));
    }
    if (new_columns || layout_.splits_depth) {
      JAXFP8_RETURN_IF_ERROR(SumLines(Right(buffers), columns, piece, buffers, stream));
    }
    JAXFP8_RETURN_IF_ERROR(Multiply(piece, buffers, stream));
    return layout_.writes_output ? Status() : RunEpilogue(piece, buffers, stream);
  }

  Status PackSide(const BoundSide& bound, const LineRange& lines, const Buffers& buffers,
                  cudaStream_t stream) const {
    if (bound.layout.packed) {
      PackRequest request;
      request.side = bound.side;
      request.lines = lines;
      request.out = bound.type;
      if (bound.side.folded) request.exponents = bound.scale;
      request.count_padded = layout_.Padded(lines.count);
      request.depth_padded = bound.layout.pitch;
      JAXFP8_RETURN_IF_ERROR(
          LaunchPack(request, bound.values, At(buffers, bound.packed_at), stream));
    }
    return bound.layout.copies_scale ? CopyScale(bound, lines, buffers, stream) : Status();
  }

  Status SumLines(const BoundSide& bound, const LineRange& lines, const Piece& piece,
                  const Buffers& buffers, cudaStream_t stream) const {
    if (!bound.layout.needs_line_sums) return {};
    LineRange piece_lines = lines;
    piece_lines.depth = std::min(piece.depth, problem_.depth - piece.start);
    return LaunchLineSums(
        bound.side, piece_lines, bound.side.dtype != bound.type,
        Bytes(bound.values, piece.start * bound.side.depth_stride, bound.side.dtype),
        reinterpret_cast<int32_t*>(At(buffers, bound.line_sums_at)), stream);
  }

  // Copies the scale of a piece, which has one batch index, into the library's order.
  Status CopyScale(const BoundSide& bound, const LineRange& lines, const Buffers& buffers,
                   cudaStream_t stream) const {
    const bool blocks = layout_.attempt.scaling == Scaling::kBlocks;
    ScaleRequest request;
    request.tiles = bound.side.tiles;
    request.batch = lines.batch;
    request.first = lines.first;
    request.free_count = lines.count;
    request.free_padded = ScalePitch(layout_.Padded(lines.count));
    if (bound.layout.square_blocks) {
      request.free_step = kScaleBlock;
      request.free_count = (lines.count + kScaleBlock - 1) / kScaleBlock;
      request.free_padded = request.free_count;
      request.free_stride = SquareScalePitch(problem_.depth);
    }
    if (blocks) {
      request.depth_count = (problem_.depth + kScaleBlock - 1) / kScaleBlock;
      request.depth_step = kScaleBlock;
      request.depth_stride = bound.layout.square_blocks ? 1 : request.free_padded;
    }
    return LaunchScales(request, bound.scale, reinterpret_cast<float*>(At(buffers, bound.scale_at)),
                        stream);
  }

  const void* Operand(const BoundSide& bound, int64_t batch, int64_t line, int64_t start,
                      const Buffers& buffers) const {
    if (bound.layout.packed) return Bytes(At(buffers, bound.packed_at), start, bound.type);
    const Side& side = bound.side;
    return Bytes(bound.values,
                 batch * side.batch_stride + line * side.free_stride + start * side.depth_stride,
                 bound.type);
  }

  const float* ScaleOf(const BoundSide& bound, int64_t batch, int64_t line,
                       const Buffers& buffers) const {
    if (bound.layout.copies_scale) return reinterpret_cast<float*>(At(buffers, bound.scale_at));
    return bound.scale ? bound.scale + bound.side.tiles.At(batch, line, 0) : nullptr;
  }

  Status Multiply(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const {
    const BoundSide left = Left(buffers), right = Right(buffers);
    MatmulBuffers to;
    to.a = Operand(right, piece.batch, piece.column, piece.start, buffers);
    to.b = Operand(left, piece.batch, piece.row, piece.start, buffers);
    to.scale_a = ScaleOf(right, piece.batch, piece.column, buffers);
    to.scale_b = ScaleOf(left, piece.batch, piece.row, buffers);
    to.scale_d = OutScaleReciprocal(buffers);
    to.amax_d = buffers.amax;
    to.d = At(buffers, layout_.offsets.accumulators);
    if (layout_.writes_output) {
      const int64_t at = problem_.out.At(piece.batch, piece.row, piece.column);
      to.d = static_cast<char*>(buffers.out) + at * SizeOf(problem_.out.dtype);
      if (problem_.residual) to.c = Bytes(buffers.residual, at, problem_.out.dtype);
    }
    to.workspace = At(buffers, layout_.offsets.library);
    to.workspace_bytes = layout_.offsets.library_bytes;
    return matmuls_.at(SizesOf(piece))->Run(to, stream);
  }

  Slab SlabOf(const Piece& piece) const {
    const int64_t pitch = Layout::AccumulatorPitch(layout_.Padded(piece.columns));
    return {layout_.types.accumulator,
            piece.batch,
            piece.batches,
            piece.row,
            piece.rows,
            piece.column,
            piece.columns,
            layout_.Padded(piece.rows) * pitch,
            pitch};
  }

  // The line sums of a piece: computed for it, or its part of the caller's.
  void SetLineSums(const BoundSide& bound, const Piece& piece, const Buffers& buffers,
                   Correction& to) const {
    const bool left = &bound.side == &problem_.lhs;
    to.line_sums_batch = left ? piece.rows : piece.columns;
    if (bound.layout.needs_line_sums) {
      to.line_sums = reinterpret_cast<int32_t*>(At(buffers, bound.line_sums_at));
    } else if (bound.layout.takes_sums) {
      const int64_t lines = left ? problem_.rows : problem_.columns;
      to.line_sums_batch = bound.side.batch_stride == 0 ? 0 : lines;
      to.line_sums =
          bound.sums + piece.batch * to.line_sums_batch + (left ? piece.row : piece.column);
    }
  }

  EpilogueRequest Request(const Piece& piece, const Buffers& buffers) const {
    EpilogueRequest request;
    request.slab = SlabOf(piece);
    for (auto [bound, to] :
         {std::pair(Left(buffers), &request.lhs), std::pair(Right(buffers), &request.rhs)}) {
      to->scale = bound.side.scale && !ByLibrary();
      to->depth = piece.start;
      to->zero_point = bound.side.zero_point;
      if (bound.type == DType::kS8 && bound.side.dtype == DType::kU8) to->shift = -128;
      SetLineSums(bound, piece, buffers, *to);
    }
    return request;
  }

  Status RunEpilogue(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const {
    EpilogueRequest request = Request(piece, buffers);
    const void* sums = At(buffers, layout_.offsets.accumulators);
    if (!layout_.splits_depth) return LaunchEpilogue(problem_, request, sums, buffers, stream);
    JAXFP8_RETURN_IF_ERROR(ScaleAndAccumulate(piece, request, buffers, stream));
    const bool last = piece.start + layout_.piece_shape.depth >= problem_.depth;
    if (!last) return {};
    request.slab.dtype = DType::kF32;
    request.lhs = request.rhs = Correction{};
    return LaunchEpilogue(problem_, request, At(buffers, layout_.offsets.scaled_accumulators),
                          buffers, stream);
  }

  // scaled_accumulators += accumulators * scales, for one piece of K: an epilogue whose output is
  // also its residual.
  Status ScaleAndAccumulate(const Piece& piece, const EpilogueRequest& request,
                            const Buffers& buffers, cudaStream_t stream) const {
    const Slab& slab = request.slab;
    Problem piece_problem;
    piece_problem.batch = problem_.batch;
    piece_problem.rows = problem_.rows;
    piece_problem.columns = problem_.columns;
    // A zero point counts once for each value of the piece.
    piece_problem.depth = std::min(piece.depth, problem_.depth - piece.start);
    piece_problem.lhs = problem_.lhs;
    piece_problem.rhs = problem_.rhs;
    piece_problem.out = {DType::kF32, slab.batch_stride, slab.row_stride, 1};
    if (piece.start > 0) piece_problem.residual = piece_problem.out;
    Buffers to = buffers;
    // Planes are addressed from the beginning of the output, the accumulators from the piece's
    // beginning.
    const auto totals =
        reinterpret_cast<uintptr_t>(At(buffers, layout_.offsets.scaled_accumulators));
    const int64_t origin = piece_problem.out.At(piece.batch, piece.row, piece.column);
    to.out = reinterpret_cast<void*>(totals - sizeof(float) * origin);
    to.residual = to.out;
    return LaunchEpilogue(piece_problem, request, At(buffers, layout_.offsets.accumulators), to,
                          stream);
  }

  const Problem problem_;
  const Layout layout_;
  std::map<PieceSizes, std::unique_ptr<const Matmul>> matmuls_;
};

}  // namespace

Status PlanProduct(const Problem& problem, const Device& device, const ProductTypes& types,
                   size_t workspace, std::unique_ptr<Plan>& plan) {
  Status status;
  for (const Attempt& attempt : Attempts(problem, device)) {
    Layout layout;
    status = MakeLayout(problem, types, attempt, workspace, layout);
    if (!status.ok()) continue;
    auto made = std::make_unique<ProductPlan>(problem, layout);
    status = made->MakeMatmuls(device);
    if (!status.ok()) continue;
    plan = std::move(made);
    break;
  }
  return status;
}

}  // namespace jaxfp8::cuda
