// The arguments of the kernels of `sm80_w8a16`, and the instances of the main one.

#pragma once

#include <cstdint>

#include "cuda/kernels/common/groups.h"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/sm80_w8a16/schedule.h"
#include "cuda/problem.h"

namespace jaxfp8::cuda::w8a16 {

// Turns the sums of an output tile into outputs.
struct EpilogueArguments {
  Elementwise elementwise;
  bool plain = true;                  // no zero points, amax, out_scale or 8-bit output
  DType rounded = DType::kNone;       // the output's own type, in a gated launch
  const float* row_scales = nullptr;  // or null
  Tiles row_tiles;
  // Needed for zero points outside their type's range.
  Side wide, weight;
};

// The order is that of first use: each further cache line of constants is a miss. Strides are in
// elements.
struct Arguments {
  SplitKSchedule schedule;
  const int32_t* group_sizes = nullptr;  // null without groups
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t weight_access_bytes = 1;     // widest aligned load: 16, 4 or 1
  int32_t activations_vectorized = 0;  // whether loads of eight are aligned
  const uint8_t* weights = nullptr;
  const void* activations = nullptr;
  float* partials = nullptr;  // on devices without clusters
  int64_t weight_pitch = 0;   // from row to row, a row as in shared memory (layout.h)
  int64_t weight_batch = 0;
  int64_t activation_row = 0, activation_depth = 0, activation_batch = 0;
  const void* scales = nullptr;          // or null
  const int32_t* zero_points = nullptr;  // or null
  int64_t scale_batch = 0, scale_depth = 0;
  int32_t scale_column = 0;
  int32_t depth_tiles_per_scale = 1;  // depth tiles per scale
  int32_t fine_depth = 0;             // K of a fine scale, 32 or 64; else 0
  bool fine_runs = false;             // whether runs of fine scales are aligned (fine_scales.cuh)
  int32_t tile_columns = 1;           // columns per scale
  uint32_t sign_flip = 0;             // from `Decoder::SignFlip`
  ScaleForm scale_form = ScaleForm::kF32;
  DType weight = DType::kNone;
  bool has_zero_points = false;  // or uint8 codes: uint8 is int8 plus 128
  EpilogueArguments epilogue;
  int64_t weight_jump = 0, scale_jump = 0;  // along the outer batch axis (batch.cuh)
  int32_t inner_batch = 1;
  Groups groups;
};

// The products of one launch. Each has its own arguments, with the same split.
struct JointArguments {
  PartTiles tiles;
  Arguments of[kMaxParts];
};

using KernelFunction = void (*)(JointArguments);

// The arguments of a problem, without the schedule and the partial tiles.
Arguments ArgumentsFor(const Problem& problem, const Buffers& buffers);

// What a launch computes: a product, several of one input, the outputs of two multiplied, groups of
// rows; or one or several with fine scales.
enum class Launch : uint8_t { kOne, kSeveral, kGated, kGroups, kFine };

// The kernel that computes a problem, alone or with others. Groups have their own.
KernelFunction KernelOf(const Problem& problem, Launch launch);

// The kernel for weights of one type, or null; CMakeLists.txt lists the instances. uint8 weights
// use the kernel for int8.
//   activation     bfloat16, float16, or, of one product or several, e4m3 with FP8 weights
//   mn_major       weights are [K, N]; else [N, K]
//   row_fragments  rows of an output tile in units of 8
template <DType kWeight, Launch kLaunch>
KernelFunction KernelFor(DType activation, bool mn_major, int row_fragments);

}  // namespace jaxfp8::cuda::w8a16
