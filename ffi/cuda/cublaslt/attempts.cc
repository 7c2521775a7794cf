#include "cuda/cublaslt/attempts.h"

namespace jaxfp8::cuda {
namespace {

// The library's kernels for vectors of scales have tiles of 128 x 128, and one block sums all of K.
// If they leave most of the device idle, its other kernels and an epilogue of our own are faster.
// On an H100 with 64 rows and 4096 columns (32 tiles on 132 multiprocessors) these are 1.36x faster
// for K = 14336 and 1.16x for K = 4096, but 1.06x slower with 28672 columns. The single scale of
// one row would have to be copied; there they are 1.14x faster even with 28672 columns.
constexpr int64_t kVectorTile = 128, kTilesOfDevice = 3, kDeepSum = 4096;

bool VectorsAreSlower(const Problem& problem, const Device& device) {
  const int64_t down = (problem.rows + kVectorTile - 1) / kVectorTile;
  const int64_t across = (problem.columns + kVectorTile - 1) / kVectorTile;
  const bool idle = problem.batch * down * across * kTilesOfDevice <= device.multiprocessors;
  return problem.depth >= kDeepSum && (idle || problem.rows == 1 || problem.columns == 1);
}

bool WholeTensor(const Side& side) {
  const Tiles& tiles = side.tiles;
  return !side.scale || (tiles.ConstantAlongDepth() && tiles.ConstantAlongFree());
}

// Whether the library can add the residual: it has the type and shape of the output.
bool AddsResidual(const Problem& problem) {
  const Plane &residual = problem.residual, &out = problem.out;
  return residual.dtype == out.dtype && residual.row_stride == out.row_stride &&
         residual.column_stride == out.column_stride &&
         (problem.batch == 1 || residual.batch_stride == out.batch_stride);
}

// Whether the library applies the activation of an FP8 product.
bool LibraryActivates(const Problem& problem) {
  if (problem.activation == Activation::kNone) return true;
  const DType lhs = problem.lhs.dtype, rhs = problem.rhs.dtype;
  const bool in_fp8 =
      IsFloat8(lhs) && IsFloat8(rhs) && (lhs == DType::kE4M3 || rhs == DType::kE4M3);
  return problem.activation == Activation::kRelu && in_fp8 && !problem.residual &&
         WholeTensor(problem.lhs) && WholeTensor(problem.rhs);
}

// Whether every tile of the scale consists of whole blocks of the library.
bool FitsBlocks(const Side& side) {
  return side.tiles.ConstantAlongDepth() || side.tiles.tile_depth % kScaleBlock == 0;
}

}  // namespace

bool VariesAlongDepth(const Side& side) {
  return (side.scale || side.zero_point) && !side.tiles.ConstantAlongDepth();
}

bool LibraryCanFinish(const Problem& problem) {
  const bool rest = problem.bias || problem.out_scale || problem.amax || !LibraryActivates(problem);
  return !rest && (!problem.residual || AddsResidual(problem)) && IsWideFloat(problem.out.dtype);
}

bool LibraryCanQuantize(const Problem& problem) {
  const auto single = [](const Plane& plane) {
    return !plane || (plane.batch_stride == 0 && plane.row_stride == 0 && plane.column_stride == 0);
  };
  const bool rest = problem.bias || problem.residual || !LibraryActivates(problem);
  return IsFloat8(problem.out.dtype) && !rest && single(problem.out_scale) &&
         single(problem.amax) && (!problem.amax || problem.batch == 1);
}

bool IsBareIntegerSum(const Problem& problem) {
  const bool plain = !problem.amax && !problem.lhs.zero_point && !problem.rhs.zero_point;
  return plain && problem.out.dtype == DType::kS32 && problem.lhs.dtype == DType::kS8 &&
         problem.rhs.dtype == DType::kS8;
}

std::vector<Attempt> Attempts(const Problem& problem, const Device& device) {
  const bool hopper = device.compute_capability == 90;
  const bool floats = IsFloat8(problem.lhs.dtype) && IsFloat8(problem.rhs.dtype);
  const bool varies = VariesAlongDepth(problem.lhs) || VariesAlongDepth(problem.rhs);
  const bool scaled = problem.lhs.scale || problem.rhs.scale;
  const bool both = problem.lhs.scale && problem.rhs.scale;
  const bool whole = WholeTensor(problem.lhs) && WholeTensor(problem.rhs);
  std::vector<Scaling> scalings;
  if (varies) {
    if (hopper && floats && both && FitsBlocks(problem.lhs) && FitsBlocks(problem.rhs)) {
      scalings.push_back(Scaling::kBlocks);
    }
  } else if (floats && whole && LibraryCanQuantize(problem)) {
    scalings.push_back(Scaling::kScalar);
  } else if (IsBareIntegerSum(problem) ||
             (LibraryCanFinish(problem) && (!scaled || (floats && whole)))) {
    scalings.push_back(Scaling::kScalar);
  } else if (LibraryCanFinish(problem) && !problem.residual && floats && hopper && both &&
             !VectorsAreSlower(problem, device)) {
    scalings.push_back(Scaling::kOuterVectors);
  }
  scalings.push_back(Scaling::kEpilogue);
  std::vector<Attempt> attempts;
  for (Scaling scaling : scalings) {
    for (bool padded : {false, true}) attempts.push_back({scaling, padded});
  }
  return attempts;
}

}  // namespace jaxfp8::cuda
