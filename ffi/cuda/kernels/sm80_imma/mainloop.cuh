// FP8 weights times int8, FP8 or 16-bit activations, on the int8 tensor cores of sm_80 and later.
//
//   sums[m, n] = sum_k round(activations[m, k] / s_m) round(weights[n, k] / s_n)      exact, int32
//
//   global     activations [M, K]                     weights [N, K] or [K, N], FP8
//                 |                                      |
//                 |   cp.async by all 4 warps, kStages - 1 stages in flight (load.cuh)
//                 v                                      v
//   shared     16 * kRowFragments rows x 64 K         128 columns x 64 K, as they are stored
//                 |                                      |
//                 |  activations.cuh: rounded to         |  weights.cuh: decoded and rounded to
//                 v  int8 where they are not yet         v  int8, once a block
//   registers  A fragments, 16 x 32 --> mma.m16n8k32 <-- B fragments, 32 x 8
//                                            |
//              acc      int32, all rows x 32 columns a warp
//                                            |  stored; added where K is split
//   global     sums     the scales and the rest of the epilogue follow (kernels/epilogue)

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_MAINLOOP_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_MAINLOOP_CUH_

#include "cuda/kernels/sm80_imma/activations.cuh"
#include "cuda/kernels/sm80_imma/weights.cuh"

namespace jaxfp8::cuda::imma {

// The shared memory of a block: the stages, then what activations are prepared in.
template <class A>
inline constexpr int kStageBytes = kWeightBytes + A::Layout::kBytes;
template <class A>
inline constexpr int kSharedBytes = kStages * kStageBytes<A> + A::kPreparedBytes;

// Stores the sums of a lane: of each of its rows eight columns.
template <int kRowFragments>
JAXFP8_DEVICE void StoreTile(const Arguments& a, int64_t batch, int first_row, int first_column,
                             const int32_t (&acc)[kRowFragments][4][4]) {
  const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
  const int column = first_column + warp * kWarpColumns + lane % 4 * 8;
  if (column >= a.pitch) return;
#pragma unroll
  for (int i = 0; i < 2 * kRowFragments; ++i) {
    const int row = first_row + 8 * i + lane / 4;
    if (row >= a.rows) continue;
    int32_t* to = a.sums + (batch - a.first_batch) * a.sums_batch +
                  int64_t{row - a.first_row} * a.pitch + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t sums[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = acc[i / 2][j][i % 2 * 2 + half];
      if (a.adds) {
        AddToSums(to + 4 * half, sums);
      } else {
        StoreSums(to + 4 * half, sums);
      }
    }
  }
}

// acc += the products of a stage.
template <class A, class W, int kRowFragments>
JAXFP8_DEVICE void MultiplyStage(const A& activations, const W& weights, uint32_t stage,
                                 uint32_t prepared, int32_t (&acc)[kRowFragments][4][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t b[4][2];
    weights.Load(stage, step, b);
#pragma unroll
    for (int f = 0; f < kRowFragments; ++f) {
      uint32_t a[4];
      activations.Load(stage + kWeightBytes, prepared, f, step, a);
#pragma unroll
      for (int j = 0; j < 4; ++j) MultiplyCodes(acc[f][j], a, b[j]);
    }
  }
}

// What a block computes: an output tile, over its share of K.
//   kActivation    int8, e4m3, e5m2, bfloat16 or float16
//   kWeight        e4m3 or e5m2
//   kMnMajor       weights are [K, N]; else [N, K]
//   kRowFragments  rows of the tile in units of 16
template <DType kActivation, Dataflow kFlow, DType kWeight, bool kMnMajor, int kRowFragments>
JAXFP8_DEVICE void MultiplyTile(const Arguments& args) {
  using A = Activations<kActivation, kFlow, kRowFragments>;
  using W = Weights<kWeight, kMnMajor>;
  const BlockIndex block = ThisBlock();
  const int64_t batch = args.first_batch + block.z;
  const int row = args.first_row + block.x % args.row_tiles * (16 * kRowFragments);
  const int column = block.x / args.row_tiles * kTileColumns;
  const int first = block.y * args.depth_tiles_per_split;
  const int left = args.depth_tiles - first;
  const int count = left < args.depth_tiles_per_split ? left : args.depth_tiles_per_split;

  const uint32_t shared = DynamicShared(), prepared = shared + kStages * kStageBytes<A>;
  const auto stage_of = [&](int i) { return shared + i % kStages * kStageBytes<A>; };
  const auto prepared_of = [&](int i) { return prepared + i % 2 * (A::kPreparedBytes / 2); };

  typename W::Source weight_copies(args.weights, batch, column, args.columns, first * kTileDepth,
                                   args.depth);
  Copier<typename A::Layout, false> activation_copies(args.activations, batch, row, args.rows,
                                                      first * kTileDepth, args.depth);
  const auto copy = [&](int i) {  // an empty group where there is nothing left
    if (i < count) {
      weight_copies.Copy(stage_of(i));
      activation_copies.Copy(stage_of(i) + kWeightBytes);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copy(i);

  const W weights(args, batch, column);
  const A activations(args, batch, row);
  if constexpr (A::kStagesAhead > 0) {
    WaitForCopies<kStages - 2>();
    if (count > 0) activations.Prepare(stage_of(0) + kWeightBytes, prepared_of(0));
  }

  int32_t acc[kRowFragments][4][4] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    WaitForCopies<kStages - 2 - A::kStagesAhead>();
    // What other threads copied and prepared has arrived, and the last stage is free again.
    SyncThreads();
    copy(i + kStages - 1);
    if (A::kStagesAhead > 0 && i + 1 < count) {
      activations.Prepare(stage_of(i + 1) + kWeightBytes, prepared_of(i + 1));
    }
    MultiplyStage(activations, weights, stage_of(i), prepared_of(i), acc);
  }
  StoreTile(args, batch, row, column, acc);
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_MAINLOOP_CUH_
