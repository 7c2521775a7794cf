// The main loop of a math warpgroup, where lhs is 8-bit weights and rhs 16-bit activations: weights
// are decoded in registers, from which wgmma reads them.
//
//   stage in shared memory                             registers of a warpgroup
//   lhs  codes, 64 rows x 64    -- 2 bytes a load -->  codes --> fragments, 64 rows x 16 of K
//        of each wave, or 64 x 64 rows                               |      (weight_rows.cuh)
//   rhs  N columns x 64, 16 bits ------------------------ 4 x wgmma of K = 16 --> acc, float32
//
// While wgmma works on one fragment the next one is decoded. A code of NaN makes its whole row NaN,
// wherever in K it is, so rows with one are remembered and made NaN in the end.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_WEIGHTS_CUH_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_WEIGHTS_CUH_

#include "cuda/kernels/sm90_gemm/load.cuh"
#include "cuda/kernels/sm90_gemm/shared_units.cuh"
#include "cuda/kernels/sm90_gemm/weight_rows.cuh"
#include "cuda/kernels/sm90_gemm/wgmma.cuh"

namespace jaxfp8::cuda::sm90 {

// K of a wgmma of 16-bit operands, and how many a stage has.
inline constexpr int kFragmentDepth = 16, kFragments = kMixedDepth / kFragmentDepth;

__device__ __forceinline__ uint32_t LoadShared16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

// Where a thread finds its codes in a stage of the ring: two rows of each wave, at depths 2t, 2t +
// 1, 2t + 8, 2t + 9 of each fragment, where t = thread % 4. Half a word is
//   lines of K   two depths of a row
//   lines of N   two rows, which are neighbours, at one depth
// Chunk c of 16 of line i lies at place c ^ i / 2 % 4. Eight lines are 512 bytes either way.
struct CodePlaces {
  uint32_t first, second;      // of the first stage's first fragment: both halves of a word
  uint32_t later[kFragments];  // what is added for a fragment

  template <typename L>
  __device__ __forceinline__ static CodePlaces Of(uint32_t shared, bool mn_major) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - kGroupThreads, lane = thread % 32;
    const int32_t warp = thread % kGroupThreads / 32, line = lane / 4, t = lane % 4;
    const int32_t group = thread / kGroupThreads * L::kWaves * kWaveRows;
    const int32_t place = line / 2 % 4;
    CodePlaces places;
    places.first = shared + L::kLhsAt + group * L::kLhsLine;
    if (mn_major) {
      places.first += 2 * t * L::kLhsLine + (warp ^ t) * 16 + 2 * line;
    } else {
      places.first += (warp * kWarpRows + line) * L::kLhsLine + place * 16 + 2 * t;
    }
    places.second = mn_major ? L::kLhsLine : 8;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      places.later[i] = mn_major ? i * kFragmentDepth * L::kLhsLine : ((place ^ i) - place) * 16;
    }
    return places;
  }
};

// The codes of a fragment.
template <typename L>
struct FragmentCodes {
  uint32_t words[L::kWaves][2];

  // first, second  of the half words
  __device__ __forceinline__ void Load(uint32_t first, uint32_t second) {
#pragma unroll
    for (int i = 0; i < 2 * L::kWaves; ++i) {
      const uint32_t at = (i / 2 * kWaveRows + i % 2 * 8) * L::kLhsLine;
      words[i / 2][i % 2] = LoadShared16(first + at) | LoadShared16(second + at) << 16;
    }
  }
};

// Two sign-extended codes less their zero point times a power of two, exactly; NaN of e4m3 as a
// number.
template <DType kWeight, DType kWide>
__device__ __forceinline__ uint32_t DecodePair(uint32_t picked, uint32_t sign_flip, uint32_t addend,
                                               uint32_t power) {
  using D = Decoder<kWeight, kWide>;
  uint32_t pair;
  if constexpr (D::kRestoresSpecials) {
    // e5m2 is the upper byte of float16, with infinity and NaN.
    float values[2];
    DecodeWord<DType::kF16>(picked << 8 & 0xff00ff00u, values);
    pair = EncodeWord<kWide>(values);
  } else {
    pair = D::template Decode<D::kInteger>(picked, sign_flip, addend);
  }
  // Adding -0 keeps the sign of zeros.
  return kWide == DType::kBF16 ? FusedPair<kWide>(pair, power, 0x80008000u) : pair;
}

// Bits that tell whether a row of a wave has had a NaN, as the codes lie in `FragmentCodes`.
template <typename L>
using RowFlags = uint32_t[L::kWaves][2];

// The A operands of a wgmma of each wave.
template <typename L, DType kWeight, DType kWide>
__device__ __forceinline__ void DecodeFragment(const FragmentCodes<L>& codes,
                                               const WeightRows<L, kWeight, kWide>& rows,
                                               uint32_t (&fragment)[L::kWaves][4],
                                               RowFlags<L>& flags) {
  using D = Decoder<kWeight, kWide>;
  const uint32_t flip = D::SignFlip(rows.weights.dtype);
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t picked =
          PickBytes(codes.words[w][0], codes.words[w][1], rows.weights.picks[i]);
      const int row = 2 * w + i % 2;
      fragment[w][i] = DecodePair<kWeight, kWide>(picked, flip, rows.addend[row], rows.power[row]);
      PinRegister(fragment[w][i]);
    }
    if constexpr (D::kFlagsNaN) {
#pragma unroll
      for (int i = 0; i < 2; ++i) flags[w][i] |= D::SpecialBits(codes.words[w][i]);
    }
  }
}

// Makes the rows NaN that have had one. Four threads have a row.
template <typename L, int kColumns>
__device__ __forceinline__ void MakeRowsNaN(float (&acc)[L::kWaves][kColumns / 2],
                                            const RowFlags<L>& flags, bool mn_major) {
#pragma unroll
  for (int i = 0; i < 2 * L::kWaves; ++i) {
    const uint32_t both = flags[i / 2][0] | flags[i / 2][1];
    uint32_t any =
        mn_major ? both & (i % 2 ? 0x80008000u : 0x00800080u) : flags[i / 2][i % 2] & 0x80808080u;
    any |= __shfl_xor_sync(~0u, any, 1), any |= __shfl_xor_sync(~0u, any, 2);
    if (!__any_sync(~0u, any)) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      if (any && j / 2 % 2 == i % 2) acc[i / 2][j] = __int_as_float(0x7fc00000);
    }
  }
}

// What a thread has of a main loop.
template <typename L, DType kWeight, DType kWide>
struct WeightsLoop {
  static constexpr int kColumns = L::kTileColumns;
  uint32_t shared, blocks;
  CodePlaces places;
  uint64_t first_rhs;
  Ring<L::kStages>& ring;
  float (&acc)[L::kWaves][kColumns / 2];
  const WeightRows<L, kWeight, kWide>& rows;
  RowFlags<L> flags = {};
  uint32_t fragments[2][L::kWaves][4];

  // Waits for the ring's stage and decodes its first fragment.
  __device__ __forceinline__ void Begin() {
    Wait(shared + L::kFullAt + 8 * ring.stage, ring.parity);
    FragmentCodes<L> first;
    const uint32_t from = places.first + ring.stage * L::kLhsBytes;
    first.Load(from, from + places.second);
    DecodeFragment<L, kWeight, kWide>(first, rows, fragments[0], flags);
  }

  // Multiplies kSteps stages, of which the first has begun, and begins the next one, if any.
  template <int kSteps>
  __device__ __forceinline__ void Multiply(bool more) {
    constexpr int kDescriptorStep = 2 * kFragmentDepth >> 4;
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
#pragma unroll
        for (int w = 0; w < L::kWaves; ++w) {
          WgmmaFromRegisters<kWide, kColumns>(acc[w], fragments[i % 2][w],
                                              rhs + i * kDescriptorStep);
        }
        WgmmaCommit();
        WgmmaWait<1>();  // for the one that reads the other fragment
        if (i == 0 && step > 0) Release(empty[step - 1], blocks);
        if (i < kFragments - 1) {
          DecodeFragment<L, kWeight, kWide>(codes[i + 1], rows, fragments[(i + 1) % 2], flags);
        } else if (step < kSteps - 1 || more) {
          Begin();
        }
      }
    }
    // Without this ptxas takes fragments for ones that may be in use, and waits for every wgmma.
    WgmmaWait<0>();
    Release(empty[kSteps - 1], blocks);
  }
};

// The sums of a part of a tile, with scales that change along K.
template <typename L, DType kWeight, DType kWide, int kColumns>
__device__ __forceinline__ void MultiplyWeights(const Arguments& a, const Part& part,
                                                float (&acc)[L::kWaves][kColumns / 2],
                                                uint32_t shared, uint32_t blocks,
                                                Ring<L::kStages>& ring) {
  const Weights& weights = a.weights;
  const TileCoord tile = TileOf(a.schedule, part.unit, static_cast<int32_t>(BlockInCluster()));
  const ThreadRows<L> of_thread(weights.mn_major);
  WeightRows<L, kWeight, kWide> rows(weights, tile.batch, tile.row * L::kTileRows + of_thread.first,
                                     of_thread.apart);
  int32_t block = weights.blocks.steps_per_scale.Quotient(part.first);
  float change[2 * L::kWaves];
  rows.Fetch(block);
  bool exceeds = rows.Next(change);
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[w][i] = 0;
  }
  WeightsLoop<L, kWeight, kWide> loop{shared,
                                      blocks,
                                      CodePlaces::Of<L>(shared, weights.mn_major),
                                      SwizzledDescriptor(shared + L::kRhsAt),
                                      ring,
                                      acc,
                                      rows};
  const auto of_block = static_cast<int32_t>(weights.blocks.steps_per_scale.divisor);
#pragma unroll 1
  for (int32_t step = part.first;;) {
    loop.Begin();
    const int32_t end = min(part.end, (block + 1) * of_block);
    if (end < part.end) rows.Fetch(block + 1);
    int32_t left = end - step;
#pragma unroll 1
    for (; left > 1; left -= 2) loop.template Multiply<2>(left > 2);
    if (left > 0) loop.template Multiply<1>(false);
    if (exceeds) {
#pragma unroll
      for (int w = 0; w < L::kWaves; ++w) PinAccumulators(acc[w]);
      rows.template SubtractExcess<kColumns>(
          acc, block, tile.column * kColumns, a.rhs_scales.last_line + 1,
          int64_t{step} * kMixedDepth, min(int64_t{end} * kMixedDepth, a.epilogue.depth));
    }
    if (end == part.end) break;
    step = end, ++block;
    exceeds = rows.Next(change);
    bool changes = false;
#pragma unroll
    for (const float c : change) changes |= c != 1.0f;
    if (__any_sync(~0u, changes)) ScaleRows(acc, change);
  }
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) PinAccumulators(acc[w]);
  if (weights.blocks.scale) ScaleRows(acc, rows.factor);
  if constexpr (Decoder<kWeight, kWide>::kFlagsNaN) {
    MakeRowsNaN<L, kColumns>(acc, loop.flags, weights.mn_major);
  }
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

// total = the scaled sums of a tile. Returns false, and no sums, where another block finishes it.
template <typename L, DType kWeight, DType kWide, int kColumns>
__device__ __forceinline__ bool SumWeights(const Arguments& a, const Part& part,
                                           float (&total)[L::kWaves][kColumns / 2], uint32_t shared,
                                           uint32_t blocks, Ring<L::kStages>& ring,
                                           Ring<L::kChunks>& chunk) {
  MultiplyWeights<L, kWeight, kWide, kColumns>(a, part, total, shared, blocks, ring);
  const int32_t math_thread = static_cast<int32_t>(threadIdx.x) - kGroupThreads;
  const int32_t group = __shfl_sync(~0u, math_thread / kGroupThreads, 0);
  if (!ShareSums<L>(a, part, total, group)) return false;
  const ThreadRows<L> of_thread(a.weights.mn_major);
  const uint32_t scales = shared + L::kScalesAt + chunk.stage * L::kChunkBytes;
  const uint32_t columns = scales + 4 * L::kTileRows + 4 * (math_thread % 4 * 2);
  Wait(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
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

#endif  // JAXFP8_CUDA_KERNELS_SM90_GEMM_WEIGHTS_CUH_
