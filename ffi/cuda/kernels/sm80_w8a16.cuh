// bfloat16 or float16 activations times 8-bit weights with the tensor cores of sm_80 and later.
//
// With few rows all time goes to reading the weights, so the weights are the 16-row operand of the
// instruction and the activations the 8-column one: out^T = weights * activations^T, and a product
// of one row wastes nothing but idle arithmetic. Weights go through shared memory as they are, many
// copies in flight, and are decoded in registers.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_CUH_

#include "cuda/kernels/decode16.cuh"
#include "cuda/kernels/mma.cuh"
#include "cuda/kernels/sm80_w8a16_fragments.h"
#include "cuda/kernels/sm80_w8a16_load.cuh"
#include "cuda/kernels/sm80_w8a16_together.cuh"

namespace jaxfp8::cuda::w8a16 {

// Sums of a warp: of[g][m][n] are those of fragment m of its columns in group g, and n of the rows.
template <int kEights>
struct Sums {
  float of[GroupsFor(kEights)][2][kEights][4];
};

// What a lane knows of its columns in all groups.
template <int kEights>
struct AllColumns {
  Columns of[GroupsFor(kEights)];
};

// Where the scales of a lane's columns begin: a division for each, once an output.
template <int kEights>
struct ScaleOffsets {
  int64_t batch;
  int32_t of[GroupsFor(kEights)][4];

  __device__ __forceinline__ ScaleOffsets(const Arguments& a, const Place& place)
      : batch(place.batch * a.scale_batch) {
#pragma unroll
    for (int g = 0; g < GroupsFor(kEights); ++g) {
      const int32_t first = place.column_tile * TileColumns(kEights) + g * kGroupColumns +
                            ColumnOf(threadIdx.x / 32, threadIdx.x % 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t column = min(first + j, a.columns - 1);
        of[g][j] = (a.tile_columns == 1 ? column : column / a.tile_columns) * a.scale_column;
      }
    }
  }
};

template <class D, int kEights>
__device__ __forceinline__ void LoadColumns(const Arguments& a,
                                            const ScaleOffsets<kEights>& offsets, int32_t stretch,
                                            AllColumns<kEights>& columns) {
  const int64_t origin = offsets.batch + stretch * a.scale_depth;
#pragma unroll
  for (int g = 0; g < GroupsFor(kEights); ++g) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t tile = origin + offsets.of[g][j];
      columns.of[g].scale[j] = a.scales ? __ldg(a.scales + tile) : 1.0f;
      if constexpr (D::kInteger) {
        const int32_t zero = a.zero_points ? __ldg(a.zero_points + tile) : 0;
        columns.of[g].less[j] = D::LessOf(a.weight, SplitZeroPoint(a.weight, zero).border);
      }
    }
  }
}

template <class D>
__device__ __forceinline__ bool AnyUnusual(const Codes& codes) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) any |= D::Unusual(codes.of[i / 4][i % 4]);
  return any & 0x80808080u;
}

// Adds the products of half a group to its sums. `kMend`: some of the codes are infinity or NaN.
template <class D, DType kWide, bool kDepthMajor, bool kMend, int kEights>
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
      DecodeStep<D, kDepthMajor>(codes.of[2 * two + one], columns, flip, fragments);
#pragma unroll
      for (int i = 0; kMend && i < 8; ++i) {
        fragments[i / 4][i % 4] = D::Mend(fragments[i / 4][i % 4]);
      }
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
__device__ __forceinline__ void MultiplyStage(const uint8_t* stage,
                                              const AllColumns<kEights>& columns, uint32_t flip,
                                              Sums<kEights>& sums) {
  constexpr int kGroups = GroupsFor(kEights);
  const uint8_t* activations = stage + kGroups * kGroupBytes;
#pragma unroll(kEights <= 2 ? 2 : 1)  // the wider tiles have no registers for two halves at once
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Codes codes = LoadCodes<kDepthMajor>(stage + g * kGroupBytes, threadIdx.x, half);
      // The whole warp takes one branch: the instructions of a step are not torn apart.
      const bool unusual =
          (D::kPoisons || D::kMends) && __any_sync(0xffffffffu, AnyUnusual<D>(codes));
      if constexpr (D::kMends) {
        if (unusual) {
          MultiplyCodes<D, kWide, kDepthMajor, true>(codes, activations, half, columns.of[g], flip,
                                                     sums.of[g]);
          continue;
        }
      }
      MultiplyCodes<D, kWide, kDepthMajor, false>(codes, activations, half, columns.of[g], flip,
                                                  sums.of[g]);
      if constexpr (D::kPoisons) {
        if (unusual) Poison<D, kWide, kDepthMajor>(codes, sums.of[g]);
      }
    }
  }
}

// At the end of a stretch: totals += sums * scales.
template <int kEights>
__device__ __forceinline__ void Fold(const AllColumns<kEights>& columns, float factor,
                                     Sums<kEights>& sums, Sums<kEights>& totals) {
#pragma unroll
  for (int g = 0; g < GroupsFor(kEights); ++g) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = columns.of[g].scale[2 * m + i / 2];
          // The factor first: a product of both could overflow where the scaled sum does not.
          const float scaled = sums.of[g][m][n][i] * factor * scale;
          totals.of[g][m][n][i] = FoldsFor(kEights) ? totals.of[g][m][n][i] + scaled : scaled;
          sums.of[g][m][n][i] = 0.0f;
        }
      }
    }
  }
}

// Puts the totals of an output into the block's slot: a line of columns for each row there is.
template <int kEights>
__device__ __forceinline__ void KeepTotals(const Arguments& a, int32_t output, const Place& place,
                                           const Sums<kEights>& totals) {
  constexpr int kColumns = TileColumns(kEights);
  const int lane = threadIdx.x % 32, left = a.rows - place.row_tile * (8 * kEights);
  const int64_t lines = min(a.rows, 8 * kEights);  // of a slot
  float* slot = a.slots + a.schedule.SlotOf(blockIdx.x, output) * (lines * kColumns) +
                ColumnOf(threadIdx.x / 32, lane);
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = RowOf(lane, n) + i;
      if (row >= left) continue;
#pragma unroll
      for (int g = 0; g < GroupsFor(kEights); ++g) {
        const auto& of = totals.of[g];
        *reinterpret_cast<float4*>(slot + row * kColumns + g * kGroupColumns) =
            make_float4(of[0][n][i], of[0][n][2 + i], of[1][n][i], of[1][n][2 + i]);
      }
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

template <DType kWeight, DType kWide, bool kDepthMajor, int kEights>
__global__ void __launch_bounds__(kThreads, BlocksFor(kEights))
    Sm80W8A16(const __grid_constant__ Arguments a) {
  using D = Decoder<kWeight, kWide>;
  constexpr int kStages = StagesFor(kEights), kStageBytes = StageBytes(kEights);
  constexpr bool kWarpgroup = kHasWarpgroupMma && PacksFor(kEights);
  extern __shared__ __align__(128) uint8_t stages[];
  LetNextLaunchStart();
  const Schedule& schedule = a.schedule;
  const int32_t begin = schedule.Begin(blockIdx.x);
  const int32_t count = schedule.Begin(blockIdx.x + 1) - begin;
  // Weights that other tiles of rows read again should stay in L2, others should not push the
  // activations out.
  const uint64_t policy = schedule.row_tiles == 1 ? ReadOncePolicy() : ReadAgainPolicy();

  Step step(schedule, begin), loading = step;
  Loader<kDepthMajor, kEights, kWarpgroup> loader;
  loader.Start(a, loading.place, loading.depth_tile);
  const auto load = [&](int stage) {
    loader.Load(a, SharedAddress(stages) + stage * kStageBytes, policy);
    if (loading.Advance(schedule)) loader.Start(a, loading.place, 0);
  };
  if constexpr (kWarpgroup) WaitForLaunchBefore();  // it packs the activations
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < count) load(i);
    CommitCopies();
  }
  Sums<kEights> sums = {}, totals = {};
  int32_t stretch = step.depth_tile / a.stretch;
  int32_t left = (stretch + 1) * a.stretch - step.depth_tile;  // tiles of the stretch
  ScaleOffsets<kEights> offsets(a, step.place);
  AllColumns<kEights> columns;
  LoadColumns<D>(a, offsets, stretch, columns);
  int stage = 0, next_stage = kStages - 1;
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
    WaitForCopies<kStages - 2>();
    // Everyone's copies of this stage are there, and everyone has read the stage filled next.
    if constexpr (kWarpgroup) ShowToWarpgroupMma();
    __syncthreads();
    if (i + kStages - 1 < count) load(next_stage);
    CommitCopies();
    if constexpr (kWarpgroup) {
      MultiplyStageTogether<D, kWide, kDepthMajor>(stages + stage * kStageBytes, columns, a.flip,
                                                   sums);
    } else {
      MultiplyStage<D, kWide, kDepthMajor>(stages + stage * kStageBytes, columns, a.flip, sums);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next_stage = next_stage + 1 == kStages ? 0 : next_stage + 1;

    const bool last = i + 1 == count || step.depth_tile + 1 == schedule.depth_tiles;
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
    if (i + 1 == count) break;
    step.Advance(schedule);
    // Without folding a stretch is the whole depth, and offsets need not be kept.
    if (last || !FoldsFor(kEights)) offsets = ScaleOffsets<kEights>(a, step.place);
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

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_CUH_
