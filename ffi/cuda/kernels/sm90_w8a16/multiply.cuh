// The main loop of a consumer warpgroup, where lhs is 8-bit weights and rhs 16-bit activations:
// weights are decoded in registers, from which wgmma reads them.
//
//   stage in shared memory                             registers of a warpgroup
//   lhs  codes, 64 rows x 64    -- 2 bytes a load -->  codes --> fragments, 64 rows x 16 of K
//        of each wave, or 64 x 64 rows                               |      (weight_rows.cuh)
//   rhs  N columns x 64, 16 bits ------------------------ 4 x wgmma of K = 16 --> acc, float32
//
// While wgmma works on two fragments the next one is decoded (weight_codes.cuh).

#pragma once

#include "cuda/kernels/sm90/wgmma.cuh"
#include "cuda/kernels/sm90_w8a16/load.cuh"
#include "cuda/kernels/sm90_w8a16/shared_units.cuh"
#include "cuda/kernels/sm90_w8a16/weight_codes.cuh"
#include "cuda/kernels/sm90_w8a16/weight_rows.cuh"

namespace jaxfp8::cuda::sm90 {

// The two warpgroups of a CTA take turns at the tensor cores, a block of scales each, where sums
// are scaled in between. Else both would scale at the same time. Nothing else uses their barriers.
struct ScaleBlockTurns {
  int32_t warpgroup;
  bool on;

  // A warpgroup may be ahead of the other one by the stages of a turn, not by more than the ring
  // has.
  __device__ __forceinline__ ScaleBlockTurns(const Weights& weights, int32_t of_warpgroup)
      : warpgroup(of_warpgroup),
        on(weights.terms == RowTerms::kScales && weights.step_scales.steps_per_scale.divisor <= 2) {
  }
  __device__ __forceinline__ void Begin() const {
    if (warpgroup == 1) Pass();
  }
  __device__ __forceinline__ void Take() const {
    if (!on) return;
    if (warpgroup == 0) {
      asm volatile("barrier.sync.aligned 3, 256;" ::: "memory");
    } else {
      asm volatile("barrier.sync.aligned 4, 256;" ::: "memory");
    }
  }
  __device__ __forceinline__ void Pass() const {
    if (!on) return;
    if (warpgroup == 0) {
      asm volatile("barrier.arrive.aligned 4, 256;" ::: "memory");
    } else {
      asm volatile("barrier.arrive.aligned 3, 256;" ::: "memory");
    }
  }
};

template <int kWgmmas, int kCount>
__device__ __forceinline__ void Clear(float (&acc)[kWgmmas][kCount]) {
#pragma unroll
  for (int w = 0; w < kWgmmas; ++w) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[w][i] = 0.0f;
  }
}

// What a thread has of a main loop.
template <typename L, DType kWeight, DType kWide, RowTerms kTerms>
struct WeightsLoop {
  static constexpr int kColumns = L::kTileColumns;
  uint32_t shared, ctas;
  ScaleBlockTurns turns;
  CodePlaces places;
  uint64_t first_rhs;
  Ring<L::kStages>& ring;
  float (&acc)[L::kWgmmas][kColumns / 2];
  WeightRows<L, kWeight, kWide, kTerms>& rows;
  RowFlags<L> flags = {};
  uint32_t fragments[3][L::kWgmmas][4];

  // Waits for the ring's stage and decodes its first fragment.
  __device__ __forceinline__ void Begin(int place) {
    Wait(shared + L::kFullAt + 8 * ring.stage, ring.parity);
    if constexpr (kTerms == RowTerms::kFine) rows.Step();
    FragmentCodes<L> first;
    const uint32_t from = places.first + ring.stage * L::kLhsBytes;
    first.Load(from, from + places.second);
    DecodeFragment<L, kWeight, kWide, kTerms>(first, 0, rows, fragments[place], flags);
  }

  // Multiplies kSteps stages, of which the first has begun, and begins the next one, if any.
  //   last  whether its turn ends with them
  template <int kSteps>
  __device__ __forceinline__ void Multiply(bool more, bool last) {
    constexpr int kDescriptorStep = 2 * kFragmentDepth >> 4;
    // Fragments are in so many places, in turn. The last one is in use when the next stage begins.
    constexpr int kAll = kSteps * kFragments, kPlaces = kSteps == 1 ? 2 : 3;
    static_assert((kAll - 1) % kPlaces != 0);
    uint32_t empty[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t from = places.first + ring.stage * L::kLhsBytes;
      const uint64_t rhs = first_rhs + ring.stage * (L::kRhsBytes >> 4);
      empty[step] = shared + L::kEmptyAt + 8 * ring.stage;
      ring.Next();
      FragmentCodes<L> codes[kFragments];
#pragma unroll
      for (int i = 1; i < kFragments; ++i) {
        const uint32_t first = from + places.later[i];
        codes[i].Load(first, first + places.second);
      }
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        WgmmaFence();
        const int at = step * kFragments + i, next = at + 1 == kAll ? 0 : (at + 1) % kPlaces;
#pragma unroll
        for (int w = 0; w < L::kWgmmas; ++w) {
          WgmmaFromRegisters<kWide, kColumns>(acc[w], fragments[at % kPlaces][w],
                                              rhs + i * kDescriptorStep);
        }
        WgmmaCommit();
        if (kTerms == RowTerms::kScales && at + 1 == kAll && last) turns.Pass();
        // Waits until the wgmma that reads the next fragment's place is done. At both ends it waits
        // for one more: only then does ptxas see that no place is in use.
        if (kPlaces == 2 || at == 0 || at + 2 >= kAll) {
          WgmmaWait<1>();
        } else {
          WgmmaWait<2>();
        }
        if (i == 1 && step > 0) Release(empty[step - 1], ctas);
        if (i < kFragments - 1) {
          DecodeFragment<L, kWeight, kWide, kTerms>(codes[i + 1], (i + 1) / kFineFragments, rows,
                                                    fragments[next], flags);
        } else if (step < kSteps - 1 || more) {
          Begin(next);
        }
      }
    }
    // Without this ptxas takes fragments for ones that may be in use, and waits for every wgmma.
    WgmmaWait<0>();
    Release(empty[kSteps - 1], ctas);
  }
};

// The sums of a part of a tile, with scales that change along K.
//   kept  where the warp keeps its tile
template <typename L, DType kWeight, DType kWide, RowTerms kTerms, int kColumns>
__device__ __forceinline__ void MultiplyWeights(const Arguments& a, const Part& part,
                                                const TileBounds& tile, uint32_t kept,
                                                float (&acc)[L::kWgmmas][kColumns / 2],
                                                uint32_t shared, uint32_t ctas,
                                                Ring<L::kStages>& ring) {
  const Weights& weights = a.weights;
  const int32_t warpgroup = static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1;
  WeightRows<L, kWeight, kWide, kTerms> rows(weights, tile.batch, tile.column);
  const auto of_block = static_cast<int32_t>(weights.step_scales.steps_per_scale.divisor);
  int32_t block = weights.step_scales.steps_per_scale.Quotient(part.first);
  float change[2 * L::kWgmmas];
  rows.Fetch(block);
  bool exceeds = rows.Next(change);
  Clear(acc);
  WeightsLoop<L, kWeight, kWide, kTerms> loop{
      shared,
      ctas,
      ScaleBlockTurns(weights, __shfl_sync(~0u, warpgroup, 0)),
      CodePlaces::Of<L>(shared, weights.mn_major),
      SwizzledMatrixDescriptor(shared + L::kRhsAt),
      ring,
      acc,
      rows};
#pragma unroll 1
  for (int32_t step = part.first;;) {
    loop.Begin(0);
    if constexpr (kTerms == RowTerms::kScales) loop.turns.Take();
    const int32_t end =
        kTerms == RowTerms::kNone ? part.end : min(part.end, (block + 1) * of_block);
    if (end < part.end) rows.Fetch(block + 1);
    int32_t left = end - step;
#pragma unroll 1
    for (; left > 1; left -= 2) loop.template Multiply<2>(left > 2, left == 2);
    if (left > 0) loop.template Multiply<1>(false, true);
    if (exceeds) {
#pragma unroll
      for (int w = 0; w < L::kWgmmas; ++w) PinAccumulators(acc[w]);
      rows.template SubtractExcess<kColumns>(
          acc, block, LoadInts(kept).y, a.rhs_scales.last_line + 1, int64_t{step} * kMixedDepth,
          min(int64_t{end} * kMixedDepth, a.epilogue.depth));
    }
    if (end == part.end) break;
    step = end, ++block;
    exceeds = rows.Next(change);
    if constexpr (kTerms == RowTerms::kScales) {
      bool changes = false;
#pragma unroll
      for (const float c : change) changes |= c != 1.0f;
      if (__any_sync(~0u, changes)) ScaleRows(acc, change);
    }
  }
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) PinAccumulators(acc[w]);
  if constexpr (kTerms == RowTerms::kScales) ScaleRows(acc, rows.factor);
  if constexpr (Decoder<kWeight, kWide>::kFlagsNaN) {
    MakeRowsNaN<L, kColumns>(acc, loop.flags, weights.mn_major);
  }
}

// The sums of a part of a tile, with fine scales.
template <typename L, DType kWeight, DType kWide, int kColumns>
__device__ __forceinline__ void MultiplyFine(const Arguments& a, const Part& part,
                                             const TileBounds& tile,
                                             float (&acc)[L::kWgmmas][kColumns / 2],
                                             uint32_t shared, uint32_t ctas,
                                             Ring<L::kStages>& ring) {
  constexpr RowTerms kTerms = RowTerms::kFine;
  const Weights& weights = a.weights;
  WeightRows<L, kWeight, kWide, kTerms> rows(weights, tile.batch, tile.column, part.first);
  Clear(acc);
  WeightsLoop<L, kWeight, kWide, kTerms> loop{shared,
                                              ctas,
                                              ScaleBlockTurns(weights, 0),
                                              CodePlaces::Of<L>(shared, weights.mn_major),
                                              SwizzledMatrixDescriptor(shared + L::kRhsAt),
                                              ring,
                                              acc,
                                              rows};
  loop.Begin(0);
  int32_t left = part.end - part.first;
#pragma unroll 1
  for (; left > 1; left -= 2) loop.template Multiply<2>(left > 2, left == 2);
  if (left > 0) loop.template Multiply<1>(false, true);
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) PinAccumulators(acc[w]);
  if constexpr (Decoder<kWeight, kWide>::kFlagsNaN) {
    MakeRowsNaN<L, kColumns>(acc, loop.flags, weights.mn_major);
  }
}

// The same with the terms that the weights have.
template <typename L, DType kWeight, DType kWide, int kColumns, typename... Rest>
__device__ __forceinline__ void MultiplyTerms(const Arguments& a, const Part& part,
                                              const TileBounds& tile, uint32_t kept,
                                              Rest&&... rest) {
  if constexpr (kWide == DType::kBF16) {
    if (a.weights.terms == RowTerms::kFine) {
      return MultiplyFine<L, kWeight, kWide, kColumns>(a, part, tile, rest...);
    }
    if (a.weights.terms == RowTerms::kScales) {
      return MultiplyWeights<L, kWeight, kWide, RowTerms::kScales, kColumns>(a, part, tile, kept,
                                                                             rest...);
    }
  }
  if constexpr (kWeight == DType::kS8) {
    if (a.weights.terms == RowTerms::kZeros) {
      return MultiplyWeights<L, kWeight, kWide, RowTerms::kZeros, kColumns>(a, part, tile, kept,
                                                                            rest...);
    }
  }
  MultiplyWeights<L, kWeight, kWide, RowTerms::kNone, kColumns>(a, part, tile, kept, rest...);
}

// A wave's sums times the scales of rows and columns.
//   factor  what `Decoder::kFactor` left to the scale
template <int kColumns>
__device__ __forceinline__ void ScaleWave(float (&acc)[kColumns / 2], const float (&rows)[2],
                                          float factor, uint32_t columns, bool by_column) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    float two[2] = {1.0f, 1.0f};
    if (by_column) {
      two[0] = LoadShared(columns + 4 * 2 * i), two[1] = LoadShared(columns + 4 * 2 * i + 4);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The factor comes first: factor * scale could overflow where the scaled sum does not.
      acc[i + j] = acc[i + j] * factor * rows[j / 2];
      if (by_column) acc[i + j] *= two[j % 2];
    }
  }
}

// total = the scaled sums of a tile. Returns false, and no sums, where another CTA finishes it.
//   kept  as above
template <typename L, DType kWeight, DType kWide, int kColumns>
__device__ __forceinline__ bool SumWeights(const Arguments& a, const Part& part,
                                           const TileBounds& tile, uint32_t kept,
                                           float (&total)[L::kWgmmas][kColumns / 2],
                                           uint32_t shared, uint32_t ctas, Ring<L::kStages>& ring,
                                           Ring<L::kChunks>& chunk) {
  MultiplyTerms<L, kWeight, kWide, kColumns>(a, part, tile, kept, total, shared, ctas, ring);
  const int32_t consumer_thread = static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads;
  const int32_t warpgroup = __shfl_sync(~0u, consumer_thread / kWarpgroupThreads, 0);
  if (!ShareSums<L>(a, part, total, warpgroup)) return false;
  const ThreadRows<L> of_thread(a.weights.mn_major);
  const uint32_t scales = shared + L::kScalesAt + chunk.stage * L::kChunkBytes;
  const uint32_t columns = scales + 4 * L::kTileRows + 4 * (consumer_thread % 4 * 2);
  Wait(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w) {
    float rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = LoadShared(scales + 4 * of_thread.At(2 * w + i));
    ScaleWave<kColumns>(total[w], rows, Decoder<kWeight, kWide>::kFactor, columns,
                        a.rhs_scales.scale != nullptr);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(shared + L::kChunkEmptyAt + 8 * chunk.stage);
  chunk.Next();
  return true;
}

}  // namespace jaxfp8::cuda::sm90
