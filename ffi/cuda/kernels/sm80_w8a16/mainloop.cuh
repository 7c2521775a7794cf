// bfloat16 or float16 activations times 8-bit weights with the tensor cores of sm_80 and later.
//
// With few rows all time goes to reading the weights, so the weights are the 16-row operand of the
// instruction and the activations the 8-column one: out^T = weights * activations^T, and a product
// of one row wastes nothing but idle arithmetic. Weights go through shared memory as they are, many
// copies in flight, and are decoded in registers. Sums go to memory: what follows them is another
// kernel (sm80_w8a16_finish.cuh).

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/mma.cuh"
#include "cuda/kernels/sm80_w8a16/fragments.h"
#include "cuda/kernels/sm80_w8a16/load.cuh"
#include "cuda/kernels/sm80_w8a16/wgmma_stage.cuh"

namespace jaxfp8::cuda::w8a16 {

// Where the scales of a lane's columns begin: a division for each, once an output.
struct ScaleOffsets {
  int64_t batch;
  int32_t of[4];

  __device__ __forceinline__ ScaleOffsets(const Arguments& a, const Place& place)
      : batch(place.batch * a.scale_batch) {
    const int32_t first =
        place.column_tile * kTileColumns + ColumnOf(threadIdx.x / 32, threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t column = min(first + j, a.columns - 1);
      of[j] = (a.tile_columns == 1 ? column : column / a.tile_columns) * a.scale_column;
    }
  }
};

template <class D>
__device__ __forceinline__ void LoadColumns(const Arguments& a, const ScaleOffsets& offsets,
                                            int32_t stretch, Columns& columns) {
  const int64_t origin = offsets.batch + stretch * a.scale_depth;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    columns.scale[j] = a.scales ? __ldg(a.scales + origin + offsets.of[j]) : 1.0f;
  }
  if constexpr (D::kInteger) {
#pragma unroll
    for (int j = 0; j < 4; ++j) columns.less[j] = D::LessOf(a.weight, 0);
    if (!a.zero_points) return;  // nothing then waits for a load
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t zero = __ldg(a.zero_points + origin + offsets.of[j]);
      columns.less[j] = D::LessOf(a.weight, SplitZeroPoint(a.weight, zero).border);
    }
  }
}

// Adds the products of half a stage to the sums.
template <class D, DType kWide, bool kDepthMajor, bool kCareful, int kEights>
__device__ __forceinline__ void MultiplyCodes(const Codes& codes, const uint8_t* activations,
                                              int half, const Columns& columns, uint32_t flip,
                                              float (&sums)[2][kEights][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    Vector16 rows[kEights];  // two steps of activations
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      rows[n] = LoadTwoSteps(activations, lane, n, 2 * half + two);
    }
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      uint32_t fragments[2][4];
      DecodeStep<D, kDepthMajor, kCareful>(codes.of[2 * two + one], columns, flip, fragments);
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          Mma<kWide>(sums[m][n], fragments[m], rows[n].words[2 * one], rows[n].words[2 * one + 1]);
        }
      }
    }
  }
}

// NaN to all sums of the columns in which the warp has a code that is NaN.
template <class D, DType kWide, bool kDepthMajor, int kEights>
__device__ __forceinline__ void Poison(const Codes& codes, float (&sums)[2][kEights][4]) {
  uint32_t fragments[2][4];
  PoisonOf<D, kDepthMajor>(codes, fragments);
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int m = 0; m < 2; ++m) Mma<kWide>(sums[m][n], fragments[m], 0, 0);
  }
}

// Adds the products of a stage to the sums.
template <class D, DType kWide, bool kDepthMajor, int kEights>
__device__ __forceinline__ void MultiplyStage(const Arguments& a, const uint8_t* stage,
                                              const Columns& columns, Sums<kEights>& sums) {
  // The wider tiles have no registers for two halves at once. With 16 rows on an H200 one at a time
  // takes 3 % less for [N, K], and 6 % more for [K, N].
#pragma unroll(kEights == 1 || (kEights == 2 && kDepthMajor) ? 2 : 1)
  for (int half = 0; half < 2; ++half) {
    const Codes codes = LoadCodes<kDepthMajor>(stage, threadIdx.x, half);
    // The whole warp takes one branch: the instructions of a step are not torn apart.
    const bool unusual = AnyOfWarpUnusual<D>(codes);
    if ((D::kMends && unusual) || (D::kSubtracts && a.subtracts)) {
      MultiplyCodes<D, kWide, kDepthMajor, true>(codes, stage + kWeightBytes, half, columns, a.flip,
                                                 sums.of);
    } else {
      MultiplyCodes<D, kWide, kDepthMajor, false>(codes, stage + kWeightBytes, half, columns,
                                                  a.flip, sums.of);
    }
    if constexpr (D::kPoisons) {
      if (unusual) Poison<D, kWide, kDepthMajor>(codes, sums.of);
    }
  }
}

// At the end of a stretch: totals += sums * scales.
template <int kEights>
__device__ __forceinline__ void Fold(const Columns& columns, float factor, Sums<kEights>& sums,
                                     Sums<kEights>& totals) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The factor first: a product of both could overflow where the scaled sum does not.
        const float scaled = sums.of[m][n][i] * factor * columns.scale[2 * m + i / 2];
        totals.of[m][n][i] = FoldsFor(kEights) ? totals.of[m][n][i] + scaled : scaled;
        sums.of[m][n][i] = 0.0f;
      }
    }
  }
}

// Puts the totals of an output into the block's slot: a line of columns for each row there is.
template <int kEights>
__device__ __forceinline__ void KeepTotals(const Arguments& a, int32_t output, const Place& place,
                                           const Sums<kEights>& totals) {
  const int lane = threadIdx.x % 32, left = a.rows - place.row_tile * (8 * kEights);
  const int64_t lines = min(a.rows, 8 * kEights);  // of a slot
  float* slot = a.slots + a.schedule.SlotOf(blockIdx.x, output) * (lines * kTileColumns) +
                ColumnOf(threadIdx.x / 32, lane);
  const auto& of = totals.of;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = RowOf(lane, n) + i;
      if (row >= left) continue;
      *reinterpret_cast<float4*>(slot + row * kTileColumns) =
          make_float4(of[0][n][i], of[0][n][2 + i], of[1][n][i], of[1][n][2 + i]);
    }
  }
}

// A step of the schedule: an output and a tile of its depth.
struct Step {
  int32_t output, depth_tile;
  Place place;

  __device__ __forceinline__ explicit Step(const Schedule& schedule, int32_t step)
      : output(step / schedule.depth_tiles),
        depth_tile(step - output * schedule.depth_tiles),
        place(schedule.PlaceOf(output)) {}

  // Whether the next step is of another output.
  __device__ __forceinline__ bool Advance(const Schedule& schedule) {
    if (++depth_tile < schedule.depth_tiles) return false;
    depth_tile = 0;
    place = schedule.PlaceOf(++output);
    return true;
  }
};

// The stages of a block: what is copied into them, and when.
template <bool kDepthMajor, int kEights, bool kPacked>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(const Arguments& a, const Step& first, int32_t count,
                                      uint8_t* stages)
      : a_(a),
        // Weights that other tiles of rows read again should stay in L2, others should not push
        // the activations out.
        policy_(a.schedule.row_tiles == 1 ? ReadOncePolicy() : ReadAgainPolicy()),
        step_(first),
        left_(count),
        stages_(stages) {
    loader_.Start(a, first.place, first.depth_tile);
    if constexpr (kPacked) {
      // The launch before packs the activations; the weights were there before it.
      loader_.LoadWeights(a, Address(0), policy_);
      WaitForLaunchBefore();
    }
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) Fill(stage, stage > 0 || !kPacked);
  }

  // The next stage, ready to be read by everyone until the next call.
  __device__ __forceinline__ const uint8_t* Next() {
    WaitForCopies<kStages - 2>();
    if constexpr (kPacked) ShowToWarpgroupMma();
    // Everyone's copies of this stage are there, and everyone has read the stage filled next.
    __syncthreads();
    Fill(stage_ == 0 ? kStages - 1 : stage_ - 1, true);
    const uint8_t* ready = stages_ + stage_ * kStageBytes;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return ready;
  }

 private:
  static constexpr int kStages = StagesFor(kEights), kStageBytes = StageBytes(kEights);

  __device__ __forceinline__ uint32_t Address(int stage) const {
    return SharedAddress(stages_) + stage * kStageBytes;
  }

  // Starts the copies of the next step, if there is one; commits them, even if there are none.
  __device__ __forceinline__ void Fill(int stage, bool with_weights) {
    if (left_-- > 0) {
      if (with_weights) loader_.LoadWeights(a_, Address(stage), policy_);
      loader_.LoadActivations(a_, Address(stage) + kWeightBytes);
      loader_.Advance(a_);
      if (step_.Advance(a_.schedule)) loader_.Start(a_, step_.place, 0);
    }
    CommitCopies();
  }

  const Arguments& a_;
  uint64_t policy_;
  Step step_;     // the next to be copied
  int32_t left_;  // how many are
  uint8_t* stages_;
  int stage_ = 0;  // the next to be read
  Loader<kDepthMajor, kEights, kPacked> loader_;
};

template <DType kWeight, DType kWide, bool kDepthMajor, int kEights>
__global__ void __launch_bounds__(kThreads, BlocksFor(kEights))
    Sm80W8A16(const __grid_constant__ Arguments a) {
  using D = Decoder<kWeight, kWide>;
  constexpr bool kWarpgroup = kHasWarpgroupMma && PacksFor(kEights);
  extern __shared__ __align__(128) uint8_t stages[];
  LetNextLaunchStart();
  const Schedule& schedule = a.schedule;
  const int32_t begin = schedule.Begin(blockIdx.x);
  const int32_t count = schedule.Begin(blockIdx.x + 1) - begin;
  Step step(schedule, begin);
  Pipeline<kDepthMajor, kEights, kWarpgroup> pipeline(a, step, count, stages);
  int32_t stretch = step.depth_tile / a.stretch;
  int32_t left = (stretch + 1) * a.stretch - step.depth_tile;  // tiles of the stretch
  ScaleOffsets offsets(a, step.place);
  Columns columns;
  LoadColumns<D>(a, offsets, stretch, columns);
  Sums<kEights> sums = {}, totals = {};
#pragma unroll 1
  for (int32_t i = 1;; ++i) {
    const uint8_t* stage = pipeline.Next();
    if constexpr (kWarpgroup) {
      MultiplyStageTogether<D, kWide, kDepthMajor>(a, stage, columns, sums);
    } else {
      MultiplyStage<D, kWide, kDepthMajor>(a, stage, columns, sums);
    }
    const bool last = i == count || step.depth_tile + 1 == schedule.depth_tiles;
    if (!last && --left > 0) {
      ++step.depth_tile;
      continue;
    }
    Fold(columns, D::kFactor, sums, totals);
    if (last) {
      KeepTotals(a, step.output, step.place, totals);
      totals = {};
      stretch = -1;
    }
    if (i == count) return;
    step.Advance(schedule);
    // Without folding a stretch is the whole depth, and offsets need not be kept.
    if (last || !FoldsFor(kEights)) offsets = ScaleOffsets(a, step.place);
    left = a.stretch;
    LoadColumns<D>(a, offsets, ++stretch, columns);
  }
}

template <DType kWeight, DType kWide, bool kDepthMajor>
KernelFunction ForEights(int eights) {
  switch (eights) {
    case 1:
      return Sm80W8A16<kWeight, kWide, kDepthMajor, 1>;
    case 2:
      return Sm80W8A16<kWeight, kWide, kDepthMajor, 2>;
    case 4:
      return Sm80W8A16<kWeight, kWide, kDepthMajor, 4>;
    case 8:
      return Sm80W8A16<kWeight, kWide, kDepthMajor, 8>;
    default:
      return nullptr;
  }
}

template <DType kWeight>
KernelFunction KernelFor(DType wide, bool depth_major, int eights) {
  if (wide == DType::kBF16) {
    return depth_major ? ForEights<kWeight, DType::kBF16, true>(eights)
                       : ForEights<kWeight, DType::kBF16, false>(eights);
  }
  return depth_major ? ForEights<kWeight, DType::kF16, true>(eights)
                     : ForEights<kWeight, DType::kF16, false>(eights);
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_MAINLOOP_CUH_
