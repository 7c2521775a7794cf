#include "cuda/cublaslt/product.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "cuda/cublaslt/matmul.h"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/epilogue/reciprocal.h"
#include "cuda/kernels/pack/pack.h"

namespace jaxfp8::cuda {
namespace {

// Batches, rows, columns and depth.
using PieceSizes = std::array<int64_t, 4>;

PieceSizes SizesOf(const Piece& piece) {
  return {piece.batches, piece.rows, piece.columns, piece.depth};
}

// Of the pieces along one axis: all have the size of a step but for the last, up to `end`.
std::vector<int64_t> SizesAlong(int64_t size, int64_t step, int64_t end) {
  if (size == 0) return {};
  const int64_t before = (size - 1) / step * step;
  if (before == 0 || end - before == step) return {end - before};
  return {step, end - before};
}

// What `ForEachPiece` comes by.
std::vector<PieceSizes> DifferentSizes(const Problem& problem, const Layout& layout) {
  const Steps& s = layout.steps;
  std::vector<PieceSizes> all;
  for (int64_t b : SizesAlong(problem.batch, s.batch, problem.batch)) {
    for (int64_t c : SizesAlong(problem.columns, s.columns, problem.columns)) {
      for (int64_t r : SizesAlong(problem.rows, s.rows, problem.rows)) {
        for (int64_t k : SizesAlong(problem.depth, s.depth, layout.depth)) {
          all.push_back({b, r, c, k});
        }
      }
    }
  }
  return all;
}

cudaDataType_t LibraryType(DType type) {
  switch (type) {
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    case DType::kS8:
      return CUDA_R_8I;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kS32:
      return CUDA_R_32I;
    default:
      return CUDA_R_32F;
  }
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

const char* Bytes(const void* from, int64_t elements, DType type) {
  return static_cast<const char*>(from) + elements * SizeOf(type);
}

// One side and its buffers, so that left and right need no code of their own.
struct Half {
  const Side& side;
  const SideLayout& layout;
  DType type;
  const void* values;
  const float* scale;
  const int32_t* zero_point;
  size_t packed_at, sums_at, scale_at;
};

class ProductPlan : public Plan {
 public:
  ProductPlan(const Problem& problem, const Layout& layout) : problem_(problem), layout_(layout) {}

  std::string MakeMatmuls(const Device& device);
  std::string Run(const Buffers& buffers, cudaStream_t stream) const override;

 private:
  MatmulShape ShapeOf(const PieceSizes& sizes) const;
  Half Left(const Buffers& buffers) const;
  Half Right(const Buffers& buffers) const;
  Slab SlabOf(const Piece& piece) const;
  EpilogueRequest Request(const Piece& piece, const Buffers& buffers) const;

  std::string MakeConstants(const Buffers& buffers, cudaStream_t stream) const;
  float* Constants(const Buffers& buffers) const;
  std::string RunPiece(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const;
  std::string Prepare(const Half& half, const Lines& lines, const Buffers& buffers,
                      cudaStream_t stream) const;
  std::string SumLines(const Half& half, const Lines& lines, const Piece& piece,
                       const Buffers& buffers, cudaStream_t stream) const;
  std::string ArrangeScale(const Half& half, const Lines& lines, const Buffers& buffers,
                           cudaStream_t stream) const;
  std::string Multiply(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const;
  std::string Finish(const Piece& piece, const Buffers& buffers, cudaStream_t stream) const;

  std::string Accumulate(const Piece& piece, const EpilogueRequest& request, const Buffers& buffers,
                         cudaStream_t stream) const;

  const void* Operand(const Half& half, int64_t batch, int64_t line, int64_t start,
                      const Buffers& buffers) const;
  const float* ScaleOf(const Half& half, int64_t batch, int64_t line, const Buffers& buffers) const;

  bool ByLibrary() const { return layout_.attempt.scaling != Scaling::kEpilogue; }

  const Problem problem_;
  const Layout layout_;
  std::map<PieceSizes, std::unique_ptr<const Matmul>> matmuls_;
};

char* At(const Buffers& buffers, size_t offset) {
  return static_cast<char*>(buffers.workspace) + offset;
}

// The reciprocal of `out_scale`.
float* ProductPlan::Constants(const Buffers& buffers) const {
  return reinterpret_cast<float*>(At(buffers, layout_.places.constants));
}

MatmulShape ProductPlan::ShapeOf(const PieceSizes& sizes) const {
  const Layout& l = layout_;
  const auto [batches, piece_rows, piece_columns, depth] = sizes;
  const int64_t rows = l.Padded(piece_rows), columns = l.Padded(piece_columns);
  MatmulShape shape;
  shape.a = LibraryType(l.types.rhs);
  shape.b = LibraryType(l.types.lhs);
  shape.d = LibraryType(l.direct ? problem_.out.dtype : l.types.sums);
  shape.m = columns;
  shape.n = rows;
  shape.k = depth;
  shape.lda = l.rhs.pitch;
  shape.ldb = l.lhs.pitch;
  shape.ldd = l.direct ? problem_.columns : Layout::SumsPitch(columns);
  shape.plain_a = l.rhs.depth_major;
  shape.transposed_b = l.lhs.depth_major;
  shape.batch = batches;
  shape.batch_a = l.rhs.packed ? columns * l.rhs.pitch : l.rhs.batch;
  shape.batch_b = l.lhs.packed ? rows * l.lhs.pitch : l.lhs.batch;
  shape.batch_d = l.direct ? problem_.out.batch : rows * shape.ldd;
  shape.add_c = l.direct && problem_.residual;
  const Scaling scaling = l.attempt.scaling;
  // The modes by vectors and blocks want a scale on both sides: ones where there is none.
  const bool both = scaling == Scaling::kOuterVectors || scaling == Scaling::kBlocks;
  shape.scale_a = both || (scaling == Scaling::kScalar && problem_.rhs.scale);
  shape.scale_b = both || (scaling == Scaling::kScalar && problem_.lhs.scale);
  shape.scale_d = l.encodes && problem_.out_scale;
  shape.amax_d = l.encodes && problem_.amax;
  shape.mode_a = LibraryMode(scaling, l.rhs);
  shape.mode_b = LibraryMode(scaling, l.lhs);
  // Block scales promote every 128 of the depth: they have no fast mode.
  shape.fast = IsFloat8(l.types.lhs) && !problem_.highest && scaling != Scaling::kBlocks;
  return shape;
}

// One product for each size of a piece, however many pieces there are.
std::string ProductPlan::MakeMatmuls(const Device& device) {
  for (const PieceSizes& sizes : DifferentSizes(problem_, layout_)) {
    std::string wrong;
    matmuls_[sizes] = Matmul::Make(device, ShapeOf(sizes), layout_.places.library_bytes, wrong);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

Half ProductPlan::Left(const Buffers& buffers) const {
  const Places& p = layout_.places;
  return {problem_.lhs,           layout_.lhs, layout_.types.lhs, buffers.lhs, buffers.lhs_scale,
          buffers.lhs_zero_point, p.lhs,       p.lhs_sums,        p.lhs_scale};
}

Half ProductPlan::Right(const Buffers& buffers) const {
  const Places& p = layout_.places;
  return {problem_.rhs,           layout_.rhs, layout_.types.rhs, buffers.rhs, buffers.rhs_scale,
          buffers.rhs_zero_point, p.rhs,       p.rhs_sums,        p.rhs_scale};
}

std::string ProductPlan::Run(const Buffers& buffers, cudaStream_t stream) const {
  if (buffers.workspace_bytes < layout_.places.end) {
    return "the workspace has " + std::to_string(buffers.workspace_bytes) + " bytes, but needs " +
           std::to_string(layout_.places.end);
  }
  std::string wrong = ClearAmax(problem_, buffers, stream);
  if (wrong.empty()) wrong = MakeConstants(buffers, stream);
  if (!wrong.empty()) return wrong;
  return ForEachPiece(problem_, layout_,
                      [&](const Piece& piece) { return RunPiece(piece, buffers, stream); });
}

std::string ProductPlan::MakeConstants(const Buffers& buffers, cudaStream_t stream) const {
  const bool divides = layout_.encodes && problem_.out_scale;
  return divides ? LaunchReciprocal(buffers.out_scale, Constants(buffers), stream) : "";
}

std::string ProductPlan::RunPiece(const Piece& piece, const Buffers& buffers,
                                  cudaStream_t stream) const {
  const int64_t depth = problem_.depth;
  // What is made of a side serves until the piece moves along that side. Sums belong to a stretch
  // of depth.
  const bool first_depth = piece.start == 0;
  const bool whole_rows = layout_.steps.rows >= problem_.rows;
  const bool new_rows = first_depth && (!whole_rows || piece.column == 0);
  const bool new_columns = first_depth && piece.row == 0;
  const Lines rows{piece.batch, piece.batches, piece.row, piece.rows, depth};
  const Lines columns{piece.batch, piece.batches, piece.column, piece.columns, depth};
  std::string wrong;
  if (new_rows) wrong = Prepare(Left(buffers), rows, buffers, stream);
  if (wrong.empty() && new_columns) wrong = Prepare(Right(buffers), columns, buffers, stream);
  if (wrong.empty() && (new_rows || layout_.cut)) {
    wrong = SumLines(Left(buffers), rows, piece, buffers, stream);
  }
  if (wrong.empty() && (new_columns || layout_.cut)) {
    wrong = SumLines(Right(buffers), columns, piece, buffers, stream);
  }
  if (wrong.empty()) wrong = Multiply(piece, buffers, stream);
  if (wrong.empty() && !layout_.direct) wrong = Finish(piece, buffers, stream);
  return wrong;
}

std::string ProductPlan::Prepare(const Half& half, const Lines& lines, const Buffers& buffers,
                                 cudaStream_t stream) const {
  if (half.layout.packed) {
    PackRequest request;
    request.side = half.side;
    request.lines = lines;
    request.out = half.type;
    request.count_padded = layout_.Padded(lines.count);
    request.depth_padded = half.layout.pitch;
    const std::string wrong =
        LaunchPack(request, half.values, nullptr, nullptr, At(buffers, half.packed_at), stream);
    if (!wrong.empty()) return wrong;
  }
  return half.layout.arranged_scale ? ArrangeScale(half, lines, buffers, stream) : "";
}

std::string ProductPlan::SumLines(const Half& half, const Lines& lines, const Piece& piece,
                                  const Buffers& buffers, cudaStream_t stream) const {
  if (!half.layout.sums) return "";
  Lines stretch = lines;
  stretch.depth = std::min(piece.depth, problem_.depth - piece.start);
  return LaunchLineSums(half.side, stretch, half.side.dtype != half.type,
                        Bytes(half.values, piece.start * half.side.depth, half.side.dtype),
                        reinterpret_cast<int32_t*>(At(buffers, half.sums_at)), stream);
}

// A piece in the library's hands has one batch index.
std::string ProductPlan::ArrangeScale(const Half& half, const Lines& lines, const Buffers& buffers,
                                      cudaStream_t stream) const {
  const bool blocks = layout_.attempt.scaling == Scaling::kBlocks;
  ScaleRequest request;
  request.tiles = half.side.tiles;
  request.batch = lines.batch;
  request.first = lines.first;
  request.free_count = lines.count;
  request.free_padded = ScalePitch(layout_.Padded(lines.count));
  if (half.layout.square_blocks) {
    request.free_step = kScaleBlock;
    request.free_count = (lines.count + kScaleBlock - 1) / kScaleBlock;
    request.free_padded = request.free_count;
    request.free_stride = SquareScalePitch(problem_.depth);
  }
  if (blocks) {
    request.depth_count = (problem_.depth + kScaleBlock - 1) / kScaleBlock;
    request.depth_step = kScaleBlock;
    request.depth_stride = half.layout.square_blocks ? 1 : request.free_padded;
  }
  return LaunchScales(request, half.scale, reinterpret_cast<float*>(At(buffers, half.scale_at)),
                      stream);
}

const void* ProductPlan::Operand(const Half& half, int64_t batch, int64_t line, int64_t start,
                                 const Buffers& buffers) const {
  if (half.layout.packed) return Bytes(At(buffers, half.packed_at), start, half.type);
  const Side& side = half.side;
  return Bytes(half.values, batch * side.batch + line * side.free + start * side.depth, half.type);
}

const float* ProductPlan::ScaleOf(const Half& half, int64_t batch, int64_t line,
                                  const Buffers& buffers) const {
  if (half.layout.arranged_scale) return reinterpret_cast<float*>(At(buffers, half.scale_at));
  return half.scale ? half.scale + half.side.tiles.At(batch, line, 0) : nullptr;
}

std::string ProductPlan::Multiply(const Piece& piece, const Buffers& buffers,
                                  cudaStream_t stream) const {
  const Half left = Left(buffers), right = Right(buffers);
  MatmulBuffers to;
  to.a = Operand(right, piece.batch, piece.column, piece.start, buffers);
  to.b = Operand(left, piece.batch, piece.row, piece.start, buffers);
  to.scale_a = ScaleOf(right, piece.batch, piece.column, buffers);
  to.scale_b = ScaleOf(left, piece.batch, piece.row, buffers);
  to.scale_d = Constants(buffers);
  to.amax_d = buffers.amax;
  to.d = At(buffers, layout_.places.sums);
  if (layout_.direct) {
    const int64_t at = problem_.out.At(piece.batch, piece.row, piece.column);
    to.d = static_cast<char*>(buffers.out) + at * SizeOf(problem_.out.dtype);
    if (problem_.residual) to.c = Bytes(buffers.residual, at, problem_.out.dtype);
  }
  to.workspace = At(buffers, layout_.places.library);
  to.workspace_bytes = layout_.places.library_bytes;
  return matmuls_.at(SizesOf(piece))->Run(to, stream);
}

Slab ProductPlan::SlabOf(const Piece& piece) const {
  const int64_t pitch = Layout::SumsPitch(layout_.Padded(piece.columns));
  return {layout_.types.sums,
          piece.batch,
          piece.batches,
          piece.row,
          piece.rows,
          piece.column,
          piece.columns,
          layout_.Padded(piece.rows) * pitch,
          pitch};
}

EpilogueRequest ProductPlan::Request(const Piece& piece, const Buffers& buffers) const {
  EpilogueRequest request;
  request.slab = SlabOf(piece);
  for (auto [half, to] :
       {std::pair(Left(buffers), &request.lhs), std::pair(Right(buffers), &request.rhs)}) {
    to->scale = half.side.scale && !ByLibrary();
    to->depth = piece.start;
    to->zero_point = half.side.zero_point;
    if (half.type == DType::kS8 && half.side.dtype == DType::kU8) to->shift = -128;
    if (half.layout.sums) to->line_sums = reinterpret_cast<int32_t*>(At(buffers, half.sums_at));
  }
  return request;
}

std::string ProductPlan::Finish(const Piece& piece, const Buffers& buffers,
                                cudaStream_t stream) const {
  EpilogueRequest request = Request(piece, buffers);
  const void* sums = At(buffers, layout_.places.sums);
  if (!layout_.cut) return LaunchEpilogue(problem_, request, sums, buffers, stream);
  const std::string wrong = Accumulate(piece, request, buffers, stream);
  const bool last = piece.start + layout_.steps.depth >= problem_.depth;
  if (!wrong.empty() || !last) return wrong;
  request.slab.dtype = DType::kF32;
  request.lhs = request.rhs = Correction{};
  return LaunchEpilogue(problem_, request, At(buffers, layout_.places.totals), buffers, stream);
}

// Scales the sums of a stretch of depth and adds them to the totals: an epilogue whose output is
// also its residual.
std::string ProductPlan::Accumulate(const Piece& piece, const EpilogueRequest& request,
                                    const Buffers& buffers, cudaStream_t stream) const {
  const Slab& slab = request.slab;
  Problem stretch;
  stretch.batch = problem_.batch;
  stretch.rows = problem_.rows;
  stretch.columns = problem_.columns;
  // Zero points count once for each value of the stretch.
  stretch.depth = std::min(piece.depth, problem_.depth - piece.start);
  stretch.lhs = problem_.lhs;
  stretch.rhs = problem_.rhs;
  stretch.out = {DType::kF32, slab.batch_stride, slab.row_stride, 1};
  if (piece.start > 0) stretch.residual = stretch.out;
  Buffers to = buffers;
  // Planes are addressed from the beginning of the output, and the totals begin with the piece.
  const auto totals = reinterpret_cast<uintptr_t>(At(buffers, layout_.places.totals));
  const int64_t origin = stretch.out.At(piece.batch, piece.row, piece.column);
  to.out = reinterpret_cast<void*>(totals - sizeof(float) * origin);
  to.residual = to.out;
  return LaunchEpilogue(stretch, request, At(buffers, layout_.places.sums), to, stream);
}

}  // namespace

std::unique_ptr<Plan> PlanProduct(const Problem& problem, const Device& device,
                                  const ProductTypes& types, size_t workspace, std::string& wrong) {
  for (const Attempt& attempt : Attempts(problem, device)) {
    Layout layout;
    wrong = MakeLayout(problem, types, attempt, workspace, layout);
    if (!wrong.empty()) continue;
    auto plan = std::make_unique<ProductPlan>(problem, layout);
    wrong = plan->MakeMatmuls(device);
    if (wrong.empty()) return plan;
  }
  return nullptr;
}

}  // namespace jaxfp8::cuda
