// The second kernel of `sm80_w8a16`: adds the blocks' sums of each tile up, and makes the output.
//
// A warp takes 128 columns of a row, four to a lane, and then of another row. Where many blocks
// share a tile, `ways` warps add every so manieth of them each. With few rows this kernel is
// nothing but latency: it starts early, does what it can before the sums are there
// (`WaitForLaunchBefore`), and then loads all of them at once.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

inline constexpr int kFinishWarps = 4, kFinishThreads = 32 * kFinishWarps;
inline constexpr int kFinishBlocks = 5;  // on a multiprocessor

struct FinishArguments {
  Schedule schedule;
  Finish finish;
  const float* slots = nullptr;
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t tile_rows = 0;
  int32_t ways = 1;                   // a power of two, kFinishWarps at the most
  int32_t lines = 1;                  // rows of a tile, or of the whole output if it is lower
  int32_t line_blocks = 1;            // blocks for them
  const float* row_scales = nullptr;  // or null
  Tiles row_tiles;
  // For zero points outside their type's range; null where there are none.
  const int32_t* zero_points = nullptr;
  const float* scales = nullptr;
  const void* activations = nullptr;
  Side wide, weight;
};

// What zero points outside their type's range add to a sum; see `ZeroPoint`. Slow, and hardly ever
// called.
__device__ __noinline__ float ExcessTerm(const FinishArguments& a, const Quad& q, int64_t column) {
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

// Whether a column has such a zero point.
__device__ __forceinline__ bool HasExcess(const FinishArguments& a, int64_t b, int64_t column) {
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

// Slots added together, all loads under way at once.
inline constexpr int kSlotsAtOnce = 8;

// Where the parts of an output are: those of a way.
struct Parts {
  const float* from;
  int64_t stride;
  int count;

  __device__ __forceinline__ Parts(const FinishArguments& a, int32_t output, int way)
      : from(a.slots), stride(int64_t{a.lines} * kTileColumns * a.ways), count(0) {
    if (a.depth == 0) return;
    const Schedule& s = a.schedule;
    const int32_t first = s.FirstBlock(output) + way, last = s.LastBlock(output);
    from += s.SlotOf(first, output) * int64_t{a.lines} * kTileColumns;
    count = first > last ? 0 : (last - first) / a.ways + 1;
  }

  // The sums at a cell of the tile.
  __device__ __forceinline__ float4 Sum(int cell) const {
    float4 sum = {};
    const float* at = from + cell;
    for (int i = 0; i < count; i += kSlotsAtOnce) {
      float4 parts[kSlotsAtOnce];
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) {
        parts[j] = make_float4(0, 0, 0, 0);
        // Written while this kernel runs: not for the read-only cache.
        if (i + j < count) parts[j] = __ldcg(reinterpret_cast<const float4*>(at));
        at += stride;
      }
#pragma unroll
      for (int j = 0; j < kSlotsAtOnce; ++j) Add(sum, parts[j]);
    }
    return sum;
  }
};

// Joins the ways of a row; the first warp of a row gets the sum.
__device__ __forceinline__ void JoinWays(int ways, float4& sum) {
  __shared__ float4 parts[kFinishThreads];
  __syncthreads();  // the row before has been read
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x / 32 % ways != 0) return;
  for (int way = 1; way < ways; ++way) Add(sum, parts[threadIdx.x + 32 * way]);
}

// The largest |y| of a warp's part of a row.
__device__ __forceinline__ void RaiseAmax(const Finish& f, const Quad& q, uint32_t largest) {
  if (f.amax_kind != AmaxKind::kOne && f.amax_kind != AmaxKind::kPerRow) return;
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(f.amax + f.amax_plane.At(q.b, q.r, 0), largest);
}

// What is left of a quad once its sums are there. `kPlain`: little is. The rest of the code is
// worth avoiding: a launch finds none of it in the instruction cache.
template <bool kPlain>
__device__ __forceinline__ void FinishSums(const FinishArguments& a, const Quad& q,
                                           const float (&bias)[4], const float (&out_scale)[4],
                                           float (&y)[4]) {
  if constexpr (kPlain) {
    if (q.count == 0) return;
    if (a.finish.residual_plane) AddResidual(a.finish, q, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] += bias[i];
    Store(a.finish, q, y);
  } else {
    RaiseAmax(a.finish, q, q.count > 0 ? FinishQuad(a.finish, q, bias, out_scale, y) : 0);
  }
}

// kPlain: no zero points, activation, amax or out_scale.
template <bool kPlain>
__global__ void __launch_bounds__(kFinishThreads, kFinishBlocks)
    FinishOutputs(const __grid_constant__ FinishArguments a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, way = warp % a.ways;
  const int32_t output = blockIdx.x / a.line_blocks;
  const Place place = a.schedule.PlaceOf(output);
  const int at_once = kFinishWarps / a.ways;
  const int32_t column = place.column_tile * kTileColumns + 4 * lane;
  const int count = max(0, min(4, a.columns - column));
  const Parts parts(a, output, way);
  const Finish& f = a.finish;
  // The rows of a block are interleaved with those of its neighbours.
  for (int base = (blockIdx.x - output * a.line_blocks) * at_once; base < a.lines;
       base += a.line_blocks * at_once) {
    const int line = base + warp / a.ways, row = place.row_tile * a.tile_rows + line;
    const bool there = line < a.lines && row < a.rows;
    const Quad q{place.batch, row, column, there ? count : 0};
    float bias[4] = {}, out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    bool excess[4] = {};
    if (f.bias_plane) LoadPlane(f.bias_plane, f.bias, q, 0.0f, bias);
    const bool scaled = a.row_scales && q.count > 0;
    const float scale = scaled ? __ldg(a.row_scales + a.row_tiles.At(q.b, row, 0)) : 1.0f;
    if constexpr (!kPlain) {
      if (f.out_scale_plane) LoadPlane(f.out_scale_plane, f.out_scale, q, 1.0f, out_scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (a.zero_points && i < q.count) excess[i] = HasExcess(a, q.b, column + i);
      }
    }
    WaitForLaunchBefore();
    float4 sum = {};
    if (q.count > 0) sum = parts.Sum(line * kTileColumns + 4 * lane);
    if (a.ways > 1) JoinWays(a.ways, sum);
    if (way != 0 || !there) continue;
    float y[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!kPlain && excess[i]) y[i] += ExcessTerm(a, q, column + i);
      y[i] *= scale;
    }
    FinishSums<kPlain>(a, q, bias, out_scale, y);
  }
}

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_SPLIT_K_CUH_
