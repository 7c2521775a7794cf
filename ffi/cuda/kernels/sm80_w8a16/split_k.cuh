// The split-K reduction of `sm80_w8a16`, and its epilogue.
//
//   sums of a rank      shared memory of its CTA, or the workspace: rows x columns float32
//      [0]   [1]   [2] ...
//        |  a warp takes one row, a lane four columns: a quad; the sums of all ranks, in order
//   registers           four sums a lane
//        |  excess of zero points, row scale, elementwise epilogue
//   global              out
//
// The ranks of a cluster share the quads of their tile. They load the epilogue's operands while
// they wait for each other.

#pragma once

#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/sm80_w8a16/arguments.h"
#include "cuda/kernels/sm80_w8a16/batch.cuh"
#include "cuda/kernels/sm80_w8a16/scales.cuh"

namespace jaxfp8::cuda::w8a16 {

// The offset of a weight's scale and zero point, in the CTA's outer batch index.
__device__ __forceinline__ int64_t WeightTile(const Arguments& a, int64_t b, int64_t column,
                                              int64_t k) {
  return a.epilogue.weight.tiles.At(b, column, k) + PastScales(a);
}

// The excess of zero points outside their type's range (`ZeroPoint`), as a term of an output. Slow
// and rare.
inline __device__ __noinline__ float ExcessTerm(const Arguments& a, const Quad& q, int64_t column) {
  const Side &wide = a.epilogue.wide, &weight = a.epilogue.weight;
  float total = 0.0f;
  const int64_t step = min(weight.tiles.tile_depth, int64_t{a.depth});
  for (int64_t k = 0; k < a.depth; k += step) {
    const int64_t tile = WeightTile(a, q.b, column, k);
    const float excess = SplitZeroPoint(weight.dtype, __ldg(a.zero_points + tile)).excess;
    if (excess == 0.0f) continue;
    float sum = 0.0f;
    const int64_t end = min(k + step, int64_t{a.depth});
    for (int64_t i = k; i < end; ++i) {
      sum += LoadWide(wide.dtype, a.activations,
                      q.b * wide.batch_stride + q.r * wide.free_stride + i * wide.depth_stride);
    }
    total -= sum * excess *
             (a.scales ? ScaleOf(a.scale_form, LoadScale(a.scales, a.scale_form, tile)) : 1.0f);
  }
  return total;
}

// Whether a column has a zero point with an excess.
__device__ __forceinline__ bool HasExcess(const Arguments& a, int64_t b, int64_t column) {
  const Tiles& tiles = a.epilogue.weight.tiles;
  const int32_t* from = a.zero_points + WeightTile(a, b, column, 0);
  const int64_t step = min(tiles.tile_depth, int64_t{a.depth});
  const int64_t count = tiles.ConstantAlongDepth() ? 1 : (a.depth + step - 1) / step;
  bool any = false;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) {
    const int32_t zero = __ldg(from + i * tiles.depth_stride);
    any |= SplitZeroPoint(a.epilogue.weight.dtype, zero).excess != 0.0f;
  }
  return any;
}

// Raises the amax of a row, or of the matrix, to the largest |y| of a warp.
__device__ __forceinline__ void UpdateRowAmax(const Elementwise& ew, const Quad& q,
                                              uint32_t largest) {
  if (ew.amax_kind != AmaxKind::kOne && ew.amax_kind != AmaxKind::kPerRow) return;
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(ew.amax + ew.amax_plane.At(q.b, q.r, 0), largest);
}

// Applies any epilogue to four sums and stores them. Not inlined: all instances of the kernel share
// it.
inline __device__ __noinline__ void StoreAnyOutputs(const Arguments& a, Quad q, float row_scale,
                                                    float4 sum) {
  const Elementwise& ew = a.epilogue.elementwise;
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (a.zero_points && i < q.count && HasExcess(a, q.b, q.c + i)) {
      y[i] += ExcessTerm(a, q, q.c + i);
    }
    y[i] *= row_scale;
  }
  UpdateRowAmax(ew, q, q.count > 0 ? ApplyWithPlanes(ew, q, /*biased=*/true, y) : 0);
}

// Not inlined either, with its arguments in registers. It serves epilogues that are otherwise
// plain: `StoreAnyOutputs` loads all its arguments anew for each quad.
inline __device__ __noinline__ float4 Activated(Activation activation, float4 y) {
  return make_float4(ApplyF32(activation, y.x), ApplyF32(activation, y.y),
                     ApplyF32(activation, y.z), ApplyF32(activation, y.w));
}

__device__ __forceinline__ void StoreWide(const Elementwise& ew, const Quad& q,
                                          const float (&y)[4]) {
  switch (ew.out_plane.dtype) {
    case DType::kF32:
      return StoreAs<DType::kF32>(ew, q, y);
    case DType::kBF16:
      return StoreAs<DType::kBF16>(ew, q, y);
    default:
      return StoreAs<DType::kF16>(ew, q, y);
  }
}

// Stores the epilogue of sums of 0, without a bias, in a tile of rows of no group.
inline __device__ __noinline__ void StoreRest(const Arguments& a, const BlockTile& tile,
                                              int tile_rows, int first, int step) {
  constexpr int kQuads = kTileColumns / 4;
  const Elementwise& ew = a.epilogue.elementwise;
  for (int i = first; i < min(tile.end - tile.row, tile_rows) * kQuads; i += step) {
    const int32_t column = tile.column_tile * kTileColumns + i % kQuads * 4;
    const Quad q{0, tile.row + i / kQuads, column, max(0, min(4, a.columns - column))};
    float y[4] = {};
    UpdateRowAmax(ew, q, q.count > 0 ? ApplyWithPlanes(ew, q, /*biased=*/false, y) : 0);
  }
}

// A quad of the output, and the epilogue's operands for it.
struct QuadOutputs {
  Quad q;
  float row_scale;
  float bias[4] = {}, residual[4] = {};  // for plain epilogues

  __device__ __forceinline__ QuadOutputs(const Arguments& a, const BlockTile& tile, int32_t row,
                                         int32_t column)
      : q{tile.batch, row, column, row < a.rows ? max(0, min(4, a.columns - column)) : 0} {
    const EpilogueArguments& e = a.epilogue;
    const bool scaled = e.row_scales && q.count > 0;
    row_scale = scaled ? __ldg(e.row_scales + e.row_tiles.At(q.b, q.r, 0)) : 1.0f;
    if (!e.plain) return;
    if (e.elementwise.bias_plane) {
      LoadPlane(e.elementwise.bias_plane, e.elementwise.bias, q, 0.0f, bias);
    }
    if (e.elementwise.residual_plane) AddResidual(e.elementwise, q, residual);
  }

  // The outputs of a plain epilogue.
  __device__ __forceinline__ void Apply(const Arguments& a, const float4& sum,
                                        float (&y)[4]) const {
    y[0] = sum.x, y[1] = sum.y, y[2] = sum.z, y[3] = sum.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = (y[i] * row_scale + residual[i]) + bias[i];
    const Activation activation = a.epilogue.elementwise.activation;
    if (activation != Activation::kNone) {
      const float4 z = Activated(activation, make_float4(y[0], y[1], y[2], y[3]));
      y[0] = z.x, y[1] = z.y, y[2] = z.z, y[3] = z.w;
    }
  }

  __device__ __forceinline__ void Store(const Arguments& a, const float4& sum) const {
    if (!a.epilogue.plain) return StoreAnyOutputs(a, q, row_scale, sum);
    if (q.count == 0) return;
    float y[4];
    Apply(a, sum, y);
    StoreWide(a.epilogue.elementwise, q, y);
  }
};

// The sums of the ranks of a cluster, in shared memory.
struct ClusterSums {
  uint32_t at;  // in the memory of this CTA

  __device__ __forceinline__ float4 Load(int rank, int row, int column) const {
    return LoadFromRank(at + 4 * (row * kSumPitch + column), rank);
  }
  __device__ __forceinline__ void Wait() const { ClusterWait(); }
};

// The sums of one CTA alone, in its shared memory.
struct BlockSums {
  const float* at;

  __device__ __forceinline__ float4 Load(int, int row, int column) const {
    return *reinterpret_cast<const float4*>(at + row * kSumPitch + column);
  }
  __device__ __forceinline__ void Wait() const { __syncthreads(); }
};

// The number of ranks with loads in flight.
inline constexpr int kRanksInFlight = 8;

template <class Sums>
__device__ __forceinline__ float4 SumOfRanks(const Sums& sums, int split, int row, int column) {
  float4 sum = sums.Load(0, row, column);
  for (int first = 1; first < split; first += kRanksInFlight) {
    float4 parts[kRanksInFlight];
#pragma unroll
    for (int j = 0; j < kRanksInFlight; ++j) {
      if (first + j < split) parts[j] = sums.Load(first + j, row, column);
    }
#pragma unroll
    for (int j = 0; j < kRanksInFlight; ++j) {
      if (first + j >= split) break;
      sum.x += parts[j].x, sum.y += parts[j].y, sum.z += parts[j].z, sum.w += parts[j].w;
    }
  }
  return sum;
}

// Adds up the ranks' sums of a tile and stores its outputs.
//   tile_rows    of the tile
//   first, step  the thread's quads; a warp has neighbours
template <class Sums>
__device__ __forceinline__ void StoreTile(const Arguments& a, const BlockTile& tile, int tile_rows,
                                          int first, int step, const Sums& sums) {
  constexpr int kQuads = kTileColumns / 4;
  const int row = tile.row, column = tile.column_tile * kTileColumns;
  const int end = min(tile.end - row, tile_rows) * kQuads;
  const auto outputs_at = [&](int i) {
    return QuadOutputs(a, tile, i < end ? row + i / kQuads : a.rows, column + i % kQuads * 4);
  };
  QuadOutputs outputs = outputs_at(first);
  __syncwarp();  // the warp reaches the next barrier as one
  sums.Wait();
#pragma unroll 1
  for (int i = first; i < end; i += step) {
    if (i != first) outputs = outputs_at(i);
    float4 sum = {};
    if (outputs.q.count > 0) {
      sum = SumOfRanks(sums, a.schedule.split, i / kQuads, i % kQuads * 4);
    }
    outputs.Store(a, sum);
  }
}

// A float as a wide type has it.
__device__ __forceinline__ float RoundedTo(DType type, float y) {
  if (type == DType::kBF16) return DecodeBF16(Encode<DType::kBF16>(y));
  return type == DType::kF16 ? DecodeFloat16<DType::kF16>(Encode<DType::kF16>(y)) : y;
}

// The sums of the second product of a gated launch: its ranks follow those of the first.
struct SecondSums {
  ClusterSums of_ranks;
  int split;

  __device__ __forceinline__ float4 Load(int rank, int row, int column) const {
    return of_ranks.Load(split + rank, row, column);
  }
};

// Loads a word of each line of constants of an epilogue. The first access to a line waits for
// memory, as the CTA does now for its first stage.
__device__ __forceinline__ void FetchEpilogue(const Arguments& a) {
  const Elementwise& ew = a.epilogue.elementwise;
  asm volatile("" ::"r"(static_cast<int>(ew.residual_plane.dtype)),
               "r"(static_cast<int>(ew.bias_plane.dtype)),
               "r"(static_cast<int>(ew.out_plane.dtype)), "r"(static_cast<int>(ew.activation)),
               "r"(static_cast<int>(a.epilogue.plain)));
}

// `StoreTile` of a gated launch. The outputs of both products, each rounded, are multiplied.
__device__ __forceinline__ void StoreGatedTile(const JointArguments& parts, const BlockTile& tile,
                                               int tile_rows, int first, int step,
                                               const ClusterSums& sums) {
  constexpr int kQuads = kTileColumns / 4;
  const Arguments &a = parts.of[0], &b = parts.of[1];
  const int row = tile.row, column = tile.column_tile * kTileColumns, split = a.schedule.split;
  const int end = min(tile.end - row, tile_rows) * kQuads;
  const auto outputs_at = [&](const Arguments& of, int i) {
    return QuadOutputs(of, tile, i < end ? row + i / kQuads : of.rows, column + i % kQuads * 4);
  };
  QuadOutputs one = outputs_at(a, first), other = outputs_at(b, first);
  __syncwarp();  // the warp reaches the next barrier as one
  sums.Wait();
#pragma unroll 1
  for (int i = first; i < end; i += step) {
    if (i != first) one = outputs_at(a, i), other = outputs_at(b, i);
    if (one.q.count == 0) continue;
    const int in_tile = i % kQuads * 4;
    const float4 first_sum = SumOfRanks(sums, split, i / kQuads, in_tile);
    const float4 second_sum = SumOfRanks(SecondSums{sums, split}, split, i / kQuads, in_tile);
    float y[4], z[4];
    one.Apply(a, first_sum, y);
    other.Apply(b, second_sum, z);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = RoundedTo(a.epilogue.rounded, y[k]) * RoundedTo(b.epilogue.rounded, z[k]);
    }
    StoreWide(a.epilogue.elementwise, one.q, y);
  }
}

}  // namespace jaxfp8::cuda::w8a16
