// Attention of one decoding step on tensor cores.
//
//   query [text, head]   registers of every warp: B fragments
//   keys, values         global -> registers, 16 tokens a warp at a time: A fragments
//   (fragments.cuh) scores               keys * query^T: lane 4g + q has tokens g and g + 8 of rows
//   2q and 2q + 1 weights              exp2 of the scores; movmatrix makes them B fragments sums
//   values^T * weights^T, in registers shared memory        the sums of a warp, its maxima and its
//   sums of weights
//
// The warps of all CTAs of a tile take its steps in turns. Keys of the next step are on their way
// while the values of this one are multiplied. Warps combine in shared memory, CTAs in a cluster or
// in a second kernel.

#pragma once

#include <cmath>

#include "cuda/kernels/attention/arguments.h"
#include "cuda/kernels/attention/combine.cuh"
#include "cuda/kernels/attention/fragments.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/mma.cuh"

namespace jaxfp8::cuda::attention {

// Swaps rows and columns of 8 x 8 pairs of bytes, a row of two a lane.
__device__ __forceinline__ uint32_t Transposed(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// The text, head and rows of a CTA.
struct Place {
  int64_t text, head;
  int tile, part;

  __device__ __forceinline__ explicit Place(const Arguments& a) {
    const int64_t pair = blockIdx.x / a.parts / a.tiles;
    part = blockIdx.x % a.parts;
    tile = blockIdx.x / a.parts % a.tiles;
    text = pair / a.p.heads, head = pair % a.p.heads;
  }
};

template <int kWidth>
struct Query {
  uint32_t words[kWidth / 8];

  // Loads the row of a lane in the order of keys.
  template <class KeysOfStep>
  __device__ __forceinline__ void Load(const Arguments& a, const Place& at, int lane) {
    const int row = at.tile * kTileRows + lane / 4;
    const auto* from = static_cast<const uint16_t*>(a.b.query) +
                       ((at.text * a.p.heads + at.head) * a.p.rows + row) * kWidth;
    constexpr int kWordsOfRun = KeysOfStep::kPerRun / 2;
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const int run = i / kWordsOfRun, word = i % kWordsOfRun;
      words[i] = 0;
      if (row < a.p.rows) {
        words[i] = __ldg(
            reinterpret_cast<const uint32_t*>(from + KeysOfStep::Start(run, lane % 4)) + word);
      }
    }
  }
};

// An array for each text, head, row and token, at the lane's own two rows.
struct Term {
  const float* from[2];
  int64_t stride;

  __device__ __forceinline__ Term(const float* array, const TermStrides& s, const Place& at,
                                  const int (&rows)[2])
      : stride(s.token) {
    const float* text = array ? array + at.text * s.text + at.head * s.head : nullptr;
#pragma unroll
    for (int i = 0; i < 2; ++i) from[i] = text ? text + rows[i] * s.row : nullptr;
  }

  __device__ __forceinline__ float At(int row, int token, float otherwise) const {
    return from[row] ? __ldg(from[row] + token * stride) : otherwise;
  }
};

// The scales and biases of a lane's tokens in a step.
struct Terms {
  float key_scale[2], value_scale[2], bias[2][2];  // [token], [token][row]
};

// What a warp has summed so far.
template <int kWidth>
struct State {
  float largest[2] = {-INFINITY, -INFINITY};
  float weights[2] = {};  // of the lane's own tokens
  float sums[kWidth / 16][4] = {};
  uint32_t nans = 0;  // the lane's values with NaN at some token
};

template <DType kCache, int kWidth>
struct Warp {
  using StepKeys = Keys<kCache, kWidth>;
  using StepValues = Values<kCache, kWidth>;
  const Arguments& a;
  const Place at;
  const int lane, last;
  int rows[2];     // of the lane, clamped
  int lengths[2];  // of these rows
  bool equal[2];   // whether all weights are
  const char *keys, *values;
  Term key_scale, value_scale, bias;
  Query<kWidth> query;

  __device__ __forceinline__ explicit Warp(const Arguments& arguments, const int (&own)[2])
      : a(arguments),
        at(arguments),
        lane(threadIdx.x % 32),
        last(static_cast<int>(arguments.p.tokens) - 1),
        rows{own[0], own[1]},
        key_scale(a.b.key_scale, a.p.key_scale, at, own),
        value_scale(a.b.value_scale, a.p.value_scale, at, own),
        bias(a.b.bias, a.p.bias, at, own) {
    const auto begin = [&](const void* cache, const CacheStrides& s) {
      return static_cast<const char*>(cache) +
             (at.text * s.text + at.head * s.head) * SizeOf(kCache);
    };
    keys = begin(a.b.keys, a.p.keys), values = begin(a.b.values, a.p.values);
    query.template Load<StepKeys>(a, at, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lengths[i] = last + 1, equal[i] = false;
      if (a.b.lengths) {
        const TermStrides& s = a.p.lengths;
        lengths[i] = min(lengths[i], a.b.lengths[at.text * s.text + rows[i] * s.row]);
      }
      if (lengths[i] <= 0 && a.p.equal_if_empty) lengths[i] = last + 1, equal[i] = true;
    }
  }

  // Steps until the last token of any row.
  __device__ __forceinline__ int Steps() const {
    const int longest = __reduce_max_sync(~0u, max(lengths[0], lengths[1]));
    return (longest + kStep - 1) / kStep;
  }

  __device__ __forceinline__ void LoadKeys(int step, StepKeys& to) const {
    to.Load(keys, a.p.keys.token * SizeOf(kCache), step * kStep, last, lane);
  }

  __device__ __forceinline__ void LoadValues(int step, StepValues& to) const {
    to.Load(values, a.p.values.token * SizeOf(kCache), step * kStep, last, lane);
  }

  __device__ __forceinline__ void LoadTerms(int step, Terms& to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = min(step * kStep + lane / 4 + 8 * i, last);
      to.key_scale[i] = key_scale.At(0, token, 1.0f);
      to.value_scale[i] = value_scale.At(0, token, 1.0f);
#pragma unroll
      for (int row = 0; row < 2; ++row) to.bias[i][row] = bias.At(row, token, 0.0f);
    }
  }

  // The scores [token][row] of a lane.
  __device__ __forceinline__ void Scores(int step, const StepKeys& own, const Terms& terms,
                                         float (&scores)[2][2]) const {
    float acc[2][4] = {};
#pragma unroll
    for (int run = 0; run < StepKeys::kRuns; ++run) {
#pragma unroll
      for (int i = 0; i < StepKeys::kFragments; ++i) {
        const uint32_t fragment[4] = {own.Pair(0, run, i, 0), own.Pair(1, run, i, 0),
                                      own.Pair(0, run, i, 1), own.Pair(1, run, i, 1)};
        const int word = 2 * (run * StepKeys::kFragments + i);
        Mma<DType::kBF16>(acc[i % 2], fragment, query.words[word], query.words[word + 1]);
      }
    }
    uint32_t nan[2] = {own.AnyNaN(0), own.AnyNaN(1)};
    if (__any_sync(~0u, (nan[0] | nan[1]) != 0)) SpreadNaN(nan, acc[0]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = step * kStep + lane / 4 + 8 * i;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float sum = acc[0][2 * i + row] + acc[1][2 * i + row];
        const float score = sum * (a.p.scale * terms.key_scale[i]), added = terms.bias[i][row];
        scores[i][row] = added <= a.p.masked ? added : score + added;
        if (equal[row]) scores[i][row] = 0.0f;
        if (token >= lengths[row]) scores[i][row] = -INFINITY;
      }
    }
  }

  // A token with NaN in some lane of its four has NaN as its scores.
  __device__ __forceinline__ static void SpreadNaN(uint32_t (&nan)[2], float (&scores)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      nan[i] |= __shfl_xor_sync(~0u, nan[i], 1);
      nan[i] |= __shfl_xor_sync(~0u, nan[i], 2);
      if (nan[i]) scores[2 * i] = scores[2 * i + 1] = NAN;
    }
  }

  // Raises the maxima to those of new scores. What is summed so far shrinks with them.
  __device__ __forceinline__ static void Raise(const float (&scores)[2][2], State<kWidth>& state) {
    bool higher = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) higher |= scores[i / 2][i % 2] > state.largest[i % 2];
    if (!__any_sync(~0u, higher)) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = fmaxf(scores[0][row], scores[1][row]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      const float before = state.largest[row], now = fmaxf(before, largest);
      const float factor = before == now ? 1.0f : exp2f((before - now) * kLog2E);
      state.largest[row] = now;
      state.weights[row] *= factor;
#pragma unroll
      for (auto& sums : state.sums) sums[row] *= factor, sums[row + 2] *= factor;
    }
  }

  // Adds the weights of a step, and gives them with the scales of values as two fragments.
  __device__ __forceinline__ static void Weights(const float (&scores)[2][2], const Terms& terms,
                                                 State<kWidth>& state, uint32_t (&fragments)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float weights[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float base = state.largest[row] == -INFINITY ? 0.0f : state.largest[row];
        weights[row] = exp2f((scores[i][row] - base) * kLog2E);
        state.weights[row] += weights[row];
        weights[row] *= terms.value_scale[i];
      }
      fragments[i] = Transposed(EncodeFloat16Pair<DType::kBF16>(weights[0], weights[1]));
    }
  }

  __device__ __forceinline__ static void AddValues(const StepValues& own,
                                                   const uint32_t (&weights)[2],
                                                   State<kWidth>& state) {
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const uint32_t fragment[4] = {own.Pair(2 * i, 0), own.Pair(2 * i + 1, 0), own.Pair(2 * i, 1),
                                    own.Pair(2 * i + 1, 1)};
      Mma<DType::kBF16>(state.sums[i], fragment, weights[0], weights[1]);
    }
    if (own.AnyNaN()) state.nans |= own.NaNs();
  }

  // Takes every `apart`-th step from the first one on.
  __device__ __forceinline__ void Run(int first, int apart, State<kWidth>& state) const {
    const int steps = Steps();
    if (first >= steps) return;
    StepKeys step_keys;
    StepValues step_values;
    Terms terms;
    LoadKeys(first, step_keys);
    LoadTerms(first, terms);
    LoadValues(first, step_values);
#pragma unroll 1
    for (int step = first; step < steps; step += apart) {
      const int next = step + apart;
      const bool more = next < steps;
      float scores[2][2];
      uint32_t weights[2];
      Scores(step, step_keys, terms, scores);
      if (more) LoadKeys(next, step_keys);
      Raise(scores, state);
      Weights(scores, terms, state, weights);
      if (more) LoadTerms(next, terms);
      AddValues(step_values, weights, state);
      if (more) LoadValues(next, step_values);
    }
    Finish(state);
  }

  // Sums weights over the lanes of all tokens. NaN among the values of any of four lanes is NaN.
  __device__ __forceinline__ static void Finish(State<kWidth>& state) {
#pragma unroll
    for (float& weights : state.weights) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        weights += __shfl_xor_sync(~0u, weights, lanes);
      }
    }
    state.nans |= __shfl_xor_sync(~0u, state.nans, 1);
    state.nans |= __shfl_xor_sync(~0u, state.nans, 2);
#pragma unroll
    for (int e = 0; e < kWidth / 8; ++e) {
      if (state.nans >> e & 1)
        state.sums[e / 2][e % 2 * 2] = state.sums[e / 2][e % 2 * 2 + 1] = NAN;
    }
  }
};

template <DType kCache, int kWidth>
__global__ void __launch_bounds__(32 * kWarps, CtasPerSm(kCache, kWidth))
    Attend(const __grid_constant__ Arguments a) {
  using Own = Warp<kCache, kWidth>;
  __shared__ Partial<kWidth> partials[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x / a.parts % a.tiles * kTileRows + lane % 4 * 2;
  const int most = static_cast<int>(a.p.rows) - 1, rows[2] = {min(row, most), min(row + 1, most)};
  const Own own(a, rows);
  State<kWidth> state;
  own.Run(own.at.part * kWarps + warp, a.parts * kWarps, state);
  Partial<kWidth>& to = partials[warp];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int of_tile = lane % 4 * 2 + i;
    if (lane < 4) to.largest[of_tile] = state.largest[i], to.weights[of_tile] = state.weights[i];
#pragma unroll
    for (int e = 0; e < kWidth / 8; ++e) {
      to.sums[of_tile][8 * e + lane / 4] = state.sums[e / 2][e % 2 * 2 + i];
    }
  }
  __syncthreads();
  Combine<typename Own::StepValues>(a, own.at, partials);
}

}  // namespace jaxfp8::cuda::attention
