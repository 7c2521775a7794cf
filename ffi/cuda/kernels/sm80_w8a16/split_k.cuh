// The second kernel of `sm80_w8a16`: adds up the partial tiles of each output tile (the split-K
// reduction) and applies the epilogue.
//
//   workspace   partial tiles of one output tile: stored_rows x 128 float32, one per block
//                  [b0]   [b1]   [b2]   [b3] ...
//                    |  a warp takes one row, four columns a lane; of many partial tiles,
//                    |  split_warps warps take every split_warps-th each
//   registers      sum of four columns a lane  -> (shared memory: sum across split_warps warps)
//                    |  * row scale, elementwise epilogue
//   global         out
//
// With few rows this kernel is bound by latency. It starts early, loads bias and scales before the
// partial tiles are complete (`WaitForPrerequisiteGrids`), and then loads all of these at once.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kReduceWarps = 4, kReduceThreads = 32 * kReduceWarps;
inline constexpr int kReduceBlocksPerSm = 5;

struct ReduceArguments {
  Schedule schedule;
  Elementwise elementwise;
  const float* partials = nullptr;
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t tile_rows = 0;
  int32_t split_warps = 1;            // warps that share a row: a power of two up to kReduceWarps
  int32_t stored_rows = 1;            // rows of a partial tile: min(rows, tile_rows)
  int32_t blocks_per_tile = 1;        // blocks that share the rows of an output tile
  const float* row_scales = nullptr;  // or null
  Tiles row_tiles;
  // Needed for zero points outside their type's range. Null if there are no zero points.
  const int32_t* zero_points = nullptr;
  const float* scales = nullptr;
  const void* activations = nullptr;
  Side wide, weight;
};

// What the excess of zero points outside their type's range (`ZeroPoint`) adds to an output. Slow
// and rare.
__device__ __noinline__ float ExcessTerm(const ReduceArguments& a, const Quad& q, int64_t column) {
  float total = 0.0f;
  const int64_t step = min(a.weight.tiles.tile_depth, int64_t{a.depth});
  for (int64_t k = 0; k < a.depth; k += step) {
    const int64_t tile = a.weight.tiles.At(q.b, column, k);
    const float excess = SplitZeroPoint(a.weight.dtype, __ldg(a.zero_points + tile)).excess;
    if (excess == 0.0f) continue;
    float sum = 0.0f;
    const int64_t end = min(k + step, int64_t{a.depth});
    for (int64_t i = k; i < end; ++i) {
      const int64_t at = q.b * a.wide.batch + q.r * a.wide.free + i * a.wide.depth;
      sum += LoadWide(a.wide.dtype, a.activations, at);
    }
    total -= sum * excess * (a.scales ? __ldg(a.scales + tile) : 1.0f);
  }
  return total;
}

// Whether a column has a zero point with an excess.
__device__ __forceinline__ bool HasExcess(const ReduceArguments& a, int64_t b, int64_t column) {
  const Tiles& tiles = a.weight.tiles;
  const int32_t* from = a.zero_points + tiles.At(b, column, 0);
  const int64_t step = min(tiles.tile_depth, int64_t{a.depth});
  const int64_t count = tiles.ConstantAlongDepth() ? 1 : (a.depth + step - 1) / step;
  bool any = false;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) {
    any |= SplitZeroPoint(a.weight.dtype, __ldg(from + i * tiles.depth_stride)).excess != 0.0f;
  }
  return any;
}

__device__ __forceinline__ void Add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

// Partial tiles whose loads are in flight at once.
inline constexpr int kPartialsInFlight = 8;

// The partial tiles of an output tile that one of split_warps warps adds up.
struct PartialTiles {
  const float* from;
  int64_t stride;
  int count;

  __device__ __forceinline__ PartialTiles(const ReduceArguments& a, int32_t output_tile, int split)
      : from(a.partials), stride(int64_t{a.stored_rows} * kTileColumns * a.split_warps), count(0) {
    if (a.depth == 0) return;
    const Schedule& s = a.schedule;
    const int32_t first = s.FirstBlock(output_tile) + split, last = s.LastBlock(output_tile);
    from += s.PartialOf(first, output_tile) * int64_t{a.stored_rows} * kTileColumns;
    count = first > last ? 0 : (last - first) / a.split_warps + 1;
  }

  // The sum of all partial tiles at four columns from `cell` on.
  __device__ __forceinline__ float4 Sum(int cell) const {
    float4 sum = {};
    const float* at = from + cell;
    for (int i = 0; i < count; i += kPartialsInFlight) {
      float4 parts[kPartialsInFlight];
#pragma unroll
      for (int j = 0; j < kPartialsInFlight; ++j) {
        parts[j] = make_float4(0, 0, 0, 0);
        // Written while this kernel runs, so the read-only cache must not be used.
        if (i + j < count) parts[j] = __ldcg(reinterpret_cast<const float4*>(at));
        at += stride;
      }
#pragma unroll
      for (int j = 0; j < kPartialsInFlight; ++j) Add(sum, parts[j]);
    }
    return sum;
  }
};

// Adds the sums of the warps that share a row. The first of them gets the result.
__device__ __forceinline__ void SumAcrossWarps(int split_warps, float4& sum) {
  __shared__ float4 parts[kReduceThreads];
  __syncthreads();  // `parts` of the row before have been read
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x / 32 % split_warps != 0) return;
  for (int split = 1; split < split_warps; ++split) Add(sum, parts[threadIdx.x + 32 * split]);
}

// Raises the amax of a row, or of the matrix, to the largest |y| of a warp.
__device__ __forceinline__ void UpdateRowAmax(const Elementwise& ew, const Quad& q,
                                              uint32_t largest) {
  if (ew.amax_kind != AmaxKind::kOne && ew.amax_kind != AmaxKind::kPerRow) return;
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(ew.amax + ew.amax_plane.At(q.b, q.r, 0), largest);
}

// Applies the epilogue to four sums and stores them. The plain epilogue has code of its own, since
// a launch finds none of the longer code in the instruction cache.
template <bool kPlain>
__device__ __forceinline__ void StoreOutputs(const ReduceArguments& a, const Quad& q,
                                             const float (&bias)[4], const float (&out_scale)[4],
                                             float (&y)[4]) {
  if constexpr (kPlain) {
    if (q.count == 0) return;
    if (a.elementwise.residual_plane) AddResidual(a.elementwise, q, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += bias[i];
    Store(a.elementwise, q, y);
  } else {
    UpdateRowAmax(a.elementwise, q,
                  q.count > 0 ? ApplyElementwise(a.elementwise, q, bias, out_scale, y) : 0);
  }
}

//   kPlain  no zero points, activation, amax or out_scale
template <bool kPlain>
__global__ void __launch_bounds__(kReduceThreads, kReduceBlocksPerSm)
    ReducePartials(const __grid_constant__ ReduceArguments a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = warp % a.split_warps;
  const int32_t output_tile = blockIdx.x / a.blocks_per_tile;
  const TileCoord coord = a.schedule.CoordOf(output_tile);
  const int at_once = kReduceWarps / a.split_warps;
  const int32_t column = coord.column_tile * kTileColumns + 4 * lane;
  const int count = max(0, min(4, a.columns - column));
  const PartialTiles parts(a, output_tile, split);
  const Elementwise& ew = a.elementwise;
  // The rows of the blocks of a tile are interleaved.
  for (int base = (blockIdx.x - output_tile * a.blocks_per_tile) * at_once; base < a.stored_rows;
       base += a.blocks_per_tile * at_once) {
    const int tile_row = base + warp / a.split_warps, row = coord.row_tile * a.tile_rows + tile_row;
    const bool in_bounds = tile_row < a.stored_rows && row < a.rows;
    const Quad q{coord.batch, row, column, in_bounds ? count : 0};
    float bias[4] = {}, out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    bool excess[4] = {};
    if (ew.bias_plane) LoadPlane(ew.bias_plane, ew.bias, q, 0.0f, bias);
    const bool scaled = a.row_scales && q.count > 0;
    const float scale = scaled ? __ldg(a.row_scales + a.row_tiles.At(q.b, row, 0)) : 1.0f;
    if constexpr (!kPlain) {
      if (ew.out_scale_plane) LoadPlane(ew.out_scale_plane, ew.out_scale, q, 1.0f, out_scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (a.zero_points && i < q.count) excess[i] = HasExcess(a, q.b, column + i);
      }
    }
    WaitForPrerequisiteGrids();
    float4 sum = {};
    if (q.count > 0) sum = parts.Sum(tile_row * kTileColumns + 4 * lane);
    if (a.split_warps > 1) SumAcrossWarps(a.split_warps, sum);
    if (split != 0 || !in_bounds) continue;
    float y[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!kPlain && excess[i]) y[i] += ExcessTerm(a, q, column + i);
      y[i] *= scale;
    }
    StoreOutputs<kPlain>(a, q, bias, out_scale, y);
  }
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_
