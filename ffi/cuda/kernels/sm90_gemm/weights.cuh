// The main loop of a math warpgroup, where lhs is 8-bit weights and rhs 16-bit activations: weights
// are decoded in registers, from which wgmma reads them.
//
//   stage in shared memory                             registers of a warpgroup
//   lhs  codes, 64 rows x 64    -- 2 bytes a load -->  codes --> fragments, 64 rows x 16 of K
//        of each wave                                                |
//   rhs  N columns x 64, 16 bits ------------------------ 4 x wgmma of K = 16 --> acc, float32
//
// While wgmma works on one fragment the next one is decoded. A code of NaN makes its whole row NaN,
// wherever in K it is, so rows with one are remembered and made NaN in the end.

#ifndef JAXFP8_CUDA_KERNELS_SM90_GEMM_WEIGHTS_CUH_
#define JAXFP8_CUDA_KERNELS_SM90_GEMM_WEIGHTS_CUH_

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/sm90_gemm/load.cuh"
#include "cuda/kernels/sm90_gemm/shared_units.cuh"
#include "cuda/kernels/sm90_gemm/wgmma.cuh"

namespace jaxfp8::cuda::sm90 {

// K of a wgmma of 16-bit operands, and how many a stage has.
inline constexpr int kFragmentDepth = 16, kFragments = kMixedDepth / kFragmentDepth;

__device__ __forceinline__ uint32_t LoadShared16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}

// The codes of a thread's two rows of each wave: depths 2t, 2t + 1, 2t + 8, 2t + 9 of a fragment,
// where t = thread % 4.
template <typename L>
struct FragmentCodes {
  uint32_t words[L::kWaves][2];

  // from  the thread's first code of its first row, at this fragment
  __device__ __forceinline__ void Load(uint32_t from) {
#pragma unroll
    for (int i = 0; i < 2 * L::kWaves; ++i) {
      const uint32_t row = from + (i / 2 * kWaveRows + i % 2 * 8) * L::kLhsLine;
      words[i / 2][i % 2] = LoadShared16(row) | LoadShared16(row + 8) << 16;
    }
  }
};

// Two of the four codes of a word, exactly; NaN of e4m3 as a number.
template <DType kWeight, DType kWide>
__device__ __forceinline__ uint32_t DecodePair(uint32_t codes, int pair) {
  using D = Decoder<kWeight, kWide>;
  if constexpr (D::kRestoresSpecials) {
    // e5m2 is the upper byte of float16, with infinity and NaN.
    const uint32_t halves = PickBytes(codes, 0, pair == 0 ? 0x1404u : 0x3424u);
    float values[2];
    DecodeWord<DType::kF16>(halves, values);
    return EncodeWord<kWide>(values);
  } else {
    const uint32_t picked = PickBytes(codes, 0, pair == 0 ? 0x9180u : 0xb3a2u);
    const uint32_t addend = D::kInteger ? D::ZeroPointAddend(kWeight, 0) : 0;
    return D::template Decode<false>(picked, D::SignFlip(kWeight), addend);
  }
}

// Bits that tell whether a row of a wave has had a NaN.
template <typename L>
using RowFlags = uint32_t[L::kWaves][2];

// The A operands of a wgmma of each wave.
template <typename L, DType kWeight, DType kWide>
__device__ __forceinline__ void DecodeFragment(const FragmentCodes<L>& codes,
                                               uint32_t (&fragment)[L::kWaves][4],
                                               RowFlags<L>& flags) {
  using D = Decoder<kWeight, kWide>;
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fragment[w][i] = DecodePair<kWeight, kWide>(codes.words[w][i % 2], i / 2);
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
                                            const RowFlags<L>& flags) {
#pragma unroll
  for (int i = 0; i < 2 * L::kWaves; ++i) {
    uint32_t any = flags[i / 2][i % 2] & 0x80808080u;
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
  uint32_t shared, blocks, first_code;
  uint64_t first_rhs;
  Ring<L::kStages>& ring;
  float (&acc)[L::kWaves][kColumns / 2];
  RowFlags<L> flags = {};
  uint32_t fragments[2][L::kWaves][4];

  // Waits for the ring's stage and decodes its first fragment.
  __device__ __forceinline__ void Begin() {
    Wait(shared + L::kFullAt + 8 * ring.stage, ring.parity);
    FragmentCodes<L> first;
    first.Load(first_code + ring.stage * L::kLhsBytes);
    DecodeFragment<L, kWeight, kWide>(first, fragments[0], flags);
  }

  // Multiplies kSteps stages, of which the first has begun, and begins the next one, if any.
  template <int kSteps>
  __device__ __forceinline__ void Multiply(bool more) {
    constexpr int kDescriptorStep = 2 * kFragmentDepth >> 4;
    uint32_t empty[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t from = first_code + ring.stage * L::kLhsBytes;
      const uint64_t rhs = first_rhs + ring.stage * (L::kRhsBytes >> 4);
      empty[step] = shared + L::kEmptyAt + 8 * ring.stage;
      ring.Next();
      FragmentCodes<L> codes[kFragments];
#pragma unroll
      for (int i = 1; i < kFragments; ++i) codes[i].Load(from ^ 16 * i);
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
          DecodeFragment<L, kWeight, kWide>(codes[i + 1], fragments[(i + 1) % 2], flags);
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

// The sums of a part of a tile: over so many steps of K.
template <typename L, DType kWeight, DType kWide, int kColumns>
__device__ __forceinline__ void MultiplyWeights(float (&acc)[L::kWaves][kColumns / 2],
                                                uint32_t shared, int32_t steps, uint32_t blocks,
                                                Ring<L::kStages>& ring) {
  const int32_t math_thread = static_cast<int32_t>(threadIdx.x) - kGroupThreads;
  const int32_t group = __shfl_sync(~0u, math_thread / kGroupThreads, 0);
  const int32_t line = math_thread % 32 / 4;
  const int32_t row =
      group * L::kWaves * kWaveRows + math_thread % kGroupThreads / 32 * kWarpRows + line;
  // In lines of 64 bytes chunk c of 16 lies at place c ^ line / 2 % 4.
  const uint32_t first_code =
      shared + L::kLhsAt + row * L::kLhsLine + (line / 2 % 4) * 16 + math_thread % 4 * 2;
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[w][i] = 0;
  }
  WeightsLoop<L, kWeight, kWide> loop{
      shared, blocks, first_code, SwizzledDescriptor(shared + L::kRhsAt), ring, acc};
  loop.Begin();
#pragma unroll 1
  for (; steps > 1; steps -= 2) loop.template Multiply<2>(steps > 2);
  if (steps > 0) loop.template Multiply<1>(false);
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) PinAccumulators(acc[w]);
  if constexpr (Decoder<kWeight, kWide>::kFlagsNaN) MakeRowsNaN<L, kColumns>(acc, loop.flags);
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
  MultiplyWeights<L, kWeight, kWide, kColumns>(total, shared, part.end - part.first, blocks, ring);
  const int32_t math_thread = static_cast<int32_t>(threadIdx.x) - kGroupThreads;
  const int32_t group = __shfl_sync(~0u, math_thread / kGroupThreads, 0);
  if (!ShareSums<L>(a, part, total, group)) return false;
  const int32_t row = group * L::kWaves * kWaveRows + math_thread % kGroupThreads / 32 * kWarpRows +
                      math_thread % 32 / 4;
  const uint32_t scales = shared + L::kScalesAt + chunk.stage * L::kChunkBytes;
  const uint32_t columns = scales + 4 * L::kTileRows + 4 * (math_thread % 4 * 2);
  Wait(shared + L::kChunkFullAt + 8 * chunk.stage, chunk.parity);
#pragma unroll
  for (int w = 0; w < L::kWaves; ++w) {
    float rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = LoadShared(scales + 4 * (row + w * kWaveRows + 8 * i));
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
