// The kernels of a pair of types, by tile shape.

#pragma once

#include <iterator>
#include <utility>

#include "cuda/kernels/sm90_gemm/kernel.cuh"
#include "cuda/kernels/sm90_gemm/kernels.h"

namespace jaxfp8::cuda::sm90 {

template <const auto& kTiles, DType kLhs, DType kRhs, Scaling kScaling, int... kShapes>
Kernel KernelOfShape(TileShape tile, std::integer_sequence<int, kShapes...>) {
  Kernel kernel;
  (void)((tile == kTiles[kShapes] &&
          (kernel = KernelOf<kLhs, kRhs, kScaling, kTiles[kShapes].rows, kTiles[kShapes].columns>(),
           true)) ||
         ...);
  return kernel;
}

template <DType kLhs, DType kRhs>
Kernel KernelFor(Scaling scaling, TileShape tile) {
  constexpr auto kAll = std::make_integer_sequence<int, std::size(kTileShapes)>{};
  if (scaling == Scaling::kBlocks) {
    return KernelOfShape<kTileShapes, kLhs, kRhs, Scaling::kBlocks>(tile, kAll);
  }
  return KernelOfShape<kTileShapes, kLhs, kRhs, Scaling::kLines>(tile, kAll);
}

template <DType kLhs, DType kRhs>
Kernel SumKernelFor(TileShape tile) {
  constexpr auto kAll = std::make_integer_sequence<int, std::size(kSumTileShapes)>{};
  return KernelOfShape<kSumTileShapes, kLhs, kRhs, Scaling::kAfter>(tile, kAll);
}

}  // namespace jaxfp8::cuda::sm90
