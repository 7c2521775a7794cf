// The arguments of the kernel of `sm80_imma`, and its instances.

#pragma once

#include <cstdint>

#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/problem.h"

namespace jaxfp8::cuda::imma {

// Strides are in elements, of one byte each.
struct Arguments {
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t split_depth = 0;  // K of a CTA, a multiple of kBlockDepth
  const uint8_t* weights = nullptr;
  int64_t weight_batch = 0, weight_pitch = 0;  // from column to column of [N, K]; K to K of [K, N]
  bool weights_aligned = false;                // whether lines are aligned to 16 bytes
  const int8_t* codes = nullptr;               // [batch, rows, codes_pitch], aligned to 16 bytes
  int64_t codes_batch = 0, codes_pitch = 0;
  const float *row_scale = nullptr, *column_scale = nullptr;  // or null
  Tiles row_tiles, column_tiles;                              // of the scales
  Elementwise elementwise;
};

using KernelFunction = void (*)(Arguments);

// The instance for FP8 weights of one type; CMakeLists.txt lists them.
//   mn_major   weights are [K, N]; else [N, K]
//   row_tiles  rows in units of 8: 1, 2 or 4
template <DType kWeight>
KernelFunction KernelFor(bool mn_major, int row_tiles);

}  // namespace jaxfp8::cuda::imma
