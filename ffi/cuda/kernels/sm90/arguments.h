// The arguments of the Hopper kernels, and what launches one.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/epilogue/dequantize.cuh"
#include "cuda/kernels/sm90/block.h"
#include "cuda/kernels/sm90/schedule.h"

namespace jaxfp8::cuda::sm90 {

// The scales of a side that change along K. That of line f and step s of batch index b is at
// b * batch_stride + f / tile_lines * line_stride + s / steps_per_scale * step_stride.
struct StepScales {
  const float* scale = nullptr;  // null: every scale is 1
  int64_t batch_stride = 0, line_stride = 0, step_stride = 0;
  Divisor tile_lines, steps_per_scale;
  int32_t last_line = 0;
  bool fours = false;                // the scales of four steps are 16 aligned bytes
  ScaleForm form = ScaleForm::kF32;  // others beside 16-bit values alone
};

// Zero points of a side, where its scales do not change along K: that of line f lies where its
// scale does.
struct ZeroPoints {
  const int32_t* zero_point = nullptr;  // null: every one is 0
  // Sums over K of the lines, that of (b, f) at b * sums_batch + f. Null unless the other side has
  // zero points.
  const int32_t* line_sums = nullptr;
  int64_t sums_batch = 0;
};

// What the main loop does with weights beside decoding: nothing; it subtracts zero points; it also
// applies scales that change along K; or it multiplies codes by scales that change within a step.
enum class RowTerms : uint8_t { kNone, kZeros, kScales, kFine };

// 8-bit weights, on the left of 16-bit values.
struct Weights {
  DType dtype = DType::kNone;
  bool mn_major = false;   // [K, N]: stages have lines of N
  uint32_t picks[4] = {};  // for `PickBytes`: the codes of each register of a fragment
  RowTerms terms = RowTerms::kNone;
  // Scales that change along K, and zero points; `step_scales.scale` is null where scales do not.
  StepScales step_scales;
  int32_t fine_depth = 0, fine_blocks = 0;  // K of a fine scale, and their number along it
  const int32_t* zero_point = nullptr;
  // The 16-bit values [batches, lines, K].
  const uint16_t* values = nullptr;
  int64_t values_batch = 0, values_line = 0;
};

struct Arguments {
  TileSchedule schedule;
  const int32_t* group_sizes = nullptr;  // where there are groups
  StepScales lhs_scales, rhs_scales;
  ZeroPoints lhs_zeros, rhs_zeros;
  bool has_zeros = false;  // a side has zero points
  Epilogue epilogue;       // without its accumulators
  bool lhs_batched = false, rhs_batched = false, out_batched = false;
  Weights weights;               // beside 16-bit values
  void* shared_units = nullptr;  // counters of the CTAs, cleared before, then their sums
  // Nothing but a cast follows the scaled sum; or, where it is scaled once, a bias for each column
  // and a cast.
  bool stores_directly = false;
  bool stores_boxes = false;  // the same of 16 bits, by a kernel that has boxes
  bool stores_fours = false;  // else: what follows needs aligned fours of columns, and they are
};

// `out` is used where boxes of the output are copied.
using KernelFunction = void (*)(Arguments, CUtensorMap lhs, CUtensorMap rhs, CUtensorMap out);

struct Kernel {
  KernelFunction function = nullptr;
  int threads = 0, shared_bytes = 0;
  bool has_boxes = false;  // of the output, which it copies (TMA)
};

}  // namespace jaxfp8::cuda::sm90
