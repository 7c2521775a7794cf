#include "cuda/cublaslt/matmul_shape.h"

namespace jaxfp8::cuda {
namespace {

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

}  // namespace

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

}  // namespace jaxfp8::cuda
