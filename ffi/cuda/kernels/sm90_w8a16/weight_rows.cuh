// Scales and zero points of the rows of weights that a thread has, where they change along K or
// are subtracted in the main loop.
//
//   K:  | step | step | step | step | ...         a step is kMixedDepth values
//       |<-- scale block |<-- ...            step_scales.steps_per_scale steps
//   fragments = (codes - zero point) * power      exact in bfloat16
//   acc += fragments * values                     tensor cores; acc is the sum over `factor`
//                        acc *= factor / next     scale = power * factor (`SplitScale`)
//
// So a tile needs one set of accumulators. Factors are within [1, 2). A fragment overflows where a
// code times a power exceeds bfloat16: from scales of 2^119 on. What is off is two roundings a
// block. Those of the next block are fetched while one is multiplied.

#pragma once

#include <type_traits>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90_w8a16/schedule.h"

namespace jaxfp8::cuda::sm90 {

// The first row of a thread in its CTA's tile, and how far its other one of a wave is. From
// weights [K, N] a thread loads the codes of two neighbours.
template <typename L>
struct ThreadRows {
  int32_t first, apart;

  __device__ __forceinline__ explicit ThreadRows(bool mn_major) : apart(mn_major ? 1 : 8) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads;
    first = thread / kWarpgroupThreads * L::kWgmmas * kWgmmaRows +
            thread % kWarpgroupThreads / 32 * kWarpRows + thread % 32 / 4 * (mn_major ? 2 : 1);
  }
  // Row i of 2 * L::kWgmmas.
  __device__ __forceinline__ int32_t At(int i) const {
    return first + i / 2 * kWgmmaRows + i % 2 * apart;
  }
};

template <typename L, DType kWeight, DType kWide, RowTerms kTerms>
struct WeightRows {
  using D = Decoder<kWeight, kWide>;
  static constexpr int kRows = 2 * L::kWgmmas;
  static constexpr bool kScales = kTerms == RowTerms::kScales;
  static constexpr bool kSubtracts = D::kInteger && kTerms != RowTerms::kNone;

  const Weights& weights;
  int32_t batch, row;  // of the tile's first row
  ThreadRows<L> of_thread;
  uint32_t sign_flip;
  uint32_t power[kRows], addend[kRows];
  float factor[kRows];
  // Fetched.
  uint32_t next_scale[kRows];
  int32_t next_zero[kRows];

  __device__ __forceinline__ WeightRows(const Weights& w, int32_t of_batch, int32_t first_row)
      : weights(w),
        batch(of_batch),
        row(first_row),
        of_thread(w.mn_major),
        sign_flip(D::SignFlip(kSubtracts ? w.dtype : kWeight)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      power[i] = BothLanes<kWide>(1.0f), factor[i] = 1.0f;
      addend[i] = D::kInteger ? D::ZeroPointAddend(kSubtracts ? w.dtype : kWeight, 0) : 0;
    }
  }

  __device__ __forceinline__ int64_t At(int i, int32_t block) const {
    const StepScales& b = weights.step_scales;
    const int32_t line = min(row + of_thread.At(i), b.last_line);
    return batch * b.batch_stride + b.tile_lines.Quotient(line) * b.line_stride +
           block * b.step_stride;
  }

  __device__ __forceinline__ void Fetch(int32_t block) {
    if constexpr (kScales) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        next_scale[i] =
            LoadScale(weights.step_scales.scale, weights.step_scales.form, At(i, block));
      }
    }
    if (kSubtracts && weights.zero_point) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) next_zero[i] = __ldg(weights.zero_point + At(i, block));
    }
  }

  // Goes on to the block that was fetched. Returns whether a zero point exceeds its type
  // (`ZeroPoint`) in a row of the warp.
  //   change  the factors before over the new ones
  __device__ __forceinline__ bool Next(float (&change)[kRows]) {
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      change[i] = 1.0f;
      if constexpr (kScales) {
        const SplitScale split(ScaleOf(weights.step_scales.form, next_scale[i]));
        change[i] = __fdividef(factor[i], split.factor);
        power[i] = split.power, factor[i] = split.factor;
      }
      if (kSubtracts && weights.zero_point) {
        const ZeroPoint zero = SplitZeroPoint(weights.dtype, next_zero[i]);
        addend[i] = D::ZeroPointAddend(weights.dtype, zero.clamped);
        exceeds |= zero.excess != 0.0f;
      }
    }
    return kSubtracts && weights.zero_point && __any_sync(~0u, exceeds);
  }

  // Subtracts what zero points exceed their type by, times the sums of the values over K of [first,
  // end). Slow and rare.
  //   column  the tile's first line of values, of `lines`
  template <int kColumns>
  __device__ __forceinline__ void SubtractExcess(float (&acc)[L::kWgmmas][kColumns / 2],
                                                 int32_t block, int32_t column, int32_t lines,
                                                 int64_t first, int64_t end) const {
    const int32_t lane = threadIdx.x % 32;
    float excess[kRows], sums[kColumns / 32];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t zero = __ldg(weights.zero_point + At(i, block));
      const float scale = WideLane<kWide>(power[i], 0);
      excess[i] = SplitZeroPoint(weights.dtype, zero).excess * scale;
    }
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int32_t line = min(column + 32 * i + lane, lines - 1);
      const uint16_t* values =
          weights.values + batch * weights.values_batch + line * weights.values_line;
      sums[i] = 0.0f;
#pragma unroll 1
      for (int64_t k = first; k < end; ++k) sums[i] += DecodeFloat16<kWide>(__ldg(values + k));
    }
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      const int place = j / 4 * 8 + j % 2;  // less this thread's
      const float sum = __shfl_sync(~0u, sums[place / 32], place % 32 + lane % 4 * 2);
#pragma unroll
      for (int w = 0; w < L::kWgmmas; ++w) {
        const float of_row = excess[2 * w + j / 2 % 2];
        if (of_row != 0.0f) acc[w][j] -= of_row * sum;  // the sum may be infinite
      }
    }
  }
};

// A scale as the sum of two bfloat16, each in both halves of a word: 16 bits of it at least. The
// lower one of a power of two is 0.
struct TwoTerms {
  uint32_t high, low;
};
template <typename Scale>
__device__ __forceinline__ Scale FactorOf(float scale) {
  if constexpr (std::is_same_v<Scale, float>) {
    return scale;
  } else {
    const uint32_t bits = BitsOf(scale), high = bits & 0xffff0000u;
    const float low = bits << 1 == 0xff000000u ? 0.0f : scale - FloatFromBits(high);
    return {high | high >> 16, EncodeFloat16Pair<DType::kBF16>(low, low)};
  }
}

// Scales of the rows that change every 32 of K, or 64 as exponents: codes are multiplied by them.
//
//   K:  | step: 32 | 32 | step: 32 | 32 | ...
//   fragments = round(codes * scale)      powers of two are exact; else one rounding to bfloat16,
//                                         and what `TwoTerms` leaves out
//
// So nothing is scaled between the products. Those of a step are fetched during the one before.
template <typename L, DType kWeight, DType kWide>
struct WeightRows<L, kWeight, kWide, RowTerms::kFine> {
  using D = Decoder<kWeight, kWide>;
  // Infinity times a lower term of 0 would be NaN: codes that have it are multiplied in float32.
  using Scale = std::conditional_t<D::kRestoresSpecials, float, TwoTerms>;
  static constexpr int kRows = 2 * L::kWgmmas, kBlocks = kMixedDepth / kFineDepth;

  const Weights& weights;
  uint32_t sign_flip = D::SignFlip(kWeight);
  int32_t blocks;        // along K
  int32_t block;         // the next one to fetch
  const uint8_t* first;  // of the batch index
  int32_t at[kRows];     // of the rows' first scales, counted from it
  Scale scale[kBlocks][kRows];
  uint32_t fetched[kBlocks][kRows];

  //   step  the first one
  __device__ __forceinline__ WeightRows(const Weights& w, int32_t batch, int32_t first_row,
                                        int32_t step)
      : weights(w),
        blocks(w.fine_blocks),
        block(step * kMixedDepth / w.fine_depth),
        first(static_cast<const uint8_t*>(static_cast<const void*>(w.step_scales.scale)) +
              batch * w.step_scales.batch_stride * BytesOf(w.step_scales.form)) {
    const ThreadRows<L> of_thread(w.mn_major);
    const StepScales& b = w.step_scales;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t line = min(first_row + of_thread.At(i), b.last_line);
      at[i] = b.tile_lines.Quotient(line) * static_cast<int32_t>(b.line_stride);
    }
    WithForm(b.form, [&]<ScaleForm kForm>() { Fetch<kForm>(); });
  }

  // Fetches the scales of a step. Those beyond K count as the last: codes are 0 there.
  template <ScaleForm kForm>
  __device__ __forceinline__ void Fetch() {
    const StepScales& b = weights.step_scales;
    const int32_t apart = weights.fine_depth == kFineDepth ? 1 : 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int32_t along =
          min(block + j * apart, blocks - 1) * static_cast<int32_t>(b.step_stride);
#pragma unroll
      for (int i = 0; i < kRows; ++i) fetched[j][i] = LoadScale(first, kForm, at[i] + along);
    }
    block += 1 + apart;
  }

  // Goes on to the step that was fetched.
  __device__ __forceinline__ void Step() {
    WithForm(weights.step_scales.form, [&]<ScaleForm kForm>() {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          scale[j][i] = FactorOf<Scale>(ScaleOf(kForm, fetched[j][i]));
        }
      }
      Fetch<kForm>();
    });
  }
};

// Multiplies the rows of a thread.
template <int kWgmmas, int kCount>
__device__ __forceinline__ void ScaleRows(float (&acc)[kWgmmas][kCount],
                                          const float (&by)[2 * kWgmmas]) {
#pragma unroll
  for (int w = 0; w < kWgmmas; ++w) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) acc[w][j] *= by[2 * w + j / 2 % 2];
  }
}

}  // namespace jaxfp8::cuda::sm90
