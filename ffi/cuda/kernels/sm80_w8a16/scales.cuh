// Scales and zero points of the weights in `sm80_w8a16`: loaded once per scale block, applied to
// float32 accumulators at its end.
//
//   K:  | tile | tile | tile | tile | ...          a tile is kTileDepth values
//       |<-- a scale block -->|                    a.depth_tiles_per_scale tiles
//   acc += products of every tile                  tensor cores
//                             scaled_acc += acc * scale; acc = 0

#pragma once

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/fragments.h"

namespace jaxfp8::cuda::w8a16 {

// The offsets of the scales of a lane's four columns. Each takes a division: they are computed
// once.
struct ScaleOffsets {
  int64_t batch;
  int32_t values[4];

  // first  the first of the four columns
  __device__ __forceinline__ ScaleOffsets(const Arguments& a, int32_t batch_index, int32_t first)
      : batch(batch_index * a.scale_batch + PastScales(a)) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t column = min(first + j, a.columns - 1);
      values[j] = (a.tile_columns == 1 ? column : column / a.tile_columns) * a.scale_column;
    }
  }
};

// Loads the scales and zero points of a lane's columns for one block of K. `ScaleOf` turns a scale
// into a float only when the accumulators are scaled: nothing waits for the load before.
//   D            the `Decoder`
//   scale_block  index of the block along K
template <class D>
__device__ __forceinline__ void LoadColumnParams(const Arguments& a, const ScaleOffsets& offsets,
                                                 int32_t scale_block, ColumnFactors& params) {
  const int64_t origin = offsets.batch + scale_block * a.scale_depth;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    params.scale[j] = a.scales ? LoadScale(a.scales, a.scale_form, origin + offsets.values[j])
                               : __float_as_uint(1.0f);
  }
  if constexpr (D::kInteger) {
#pragma unroll
    for (int j = 0; j < 4; ++j) params.zero_addend[j] = D::ZeroPointAddend(a.weight, 0);
    if (!a.zero_points) return;  // without zero points nothing waits for a load
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t zero = __ldg(a.zero_points + origin + offsets.values[j]);
      params.zero_addend[j] = D::ZeroPointAddend(a.weight, SplitZeroPoint(a.weight, zero).clamped);
    }
  }
}

// At the end of a scale block: scaled_acc += acc * scales, and acc = 0. Tiles too wide for two sets
// of accumulators have scales constant along K: there scaled_acc = acc * scales.
//   factor  the scale's share of the decoding (`Decoder::kFactor`)
template <int kRowFragments>
__device__ __forceinline__ void ScaleAccumulators(const ColumnFactors& params, ScaleForm form,
                                                  float factor, Accumulators<kRowFragments>& acc,
                                                  Accumulators<kRowFragments>& scaled_acc) {
  float scale[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) scale[j] = ScaleOf(form, params.scale[j]);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kRowFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The factor comes first: factor * scale could overflow where the scaled sum does not.
        const float scaled = acc.values[m][n][i] * factor * scale[2 * m + i / 2];
        scaled_acc.values[m][n][i] =
            KeepsScaledAccumulators(kRowFragments) ? scaled_acc.values[m][n][i] + scaled : scaled;
        acc.values[m][n][i] = 0.0f;
      }
    }
  }
}

}  // namespace jaxfp8::cuda::w8a16
