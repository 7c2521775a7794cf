// Up to 32 rows of int8 times FP8 weights, on the int8 tensor cores of sm_80 and later. Each weight
// is read from memory once, though its column's amax has to be known before it is rounded.
//
//   sums[m, n] = sum_k activations[m, k] * round(weights[n, k] / step[n])      exact, int32
//
//   global     weights [N, K]                 weights [K, N]
//                |  cp.async, 16 bytes          |  16 bytes of 4 lines, transposed in registers
//                v                              v
//   shared     16 or 32 columns x all of the CTA's K, as FP8: a line for each column
//                |  once: the amax of each column, and of it in the cluster
//                |  ld.shared, 16 bytes a lane: 64 K of a column for 4 lanes
//                v
//   registers  Round (rounding.cuh): A fragments, 16 columns x 32 K, int8
//                |                            B fragments, 8 rows x 32 K <- ld.global, 16 bytes a
//                |                               |                         lane, through L2
//                +-----> mma.m16n8k32 <----------+
//                             |  int32, 16 columns x 8 rows; a warp has every 8th block of 64 K
//                             v
//   shared     sums of all warps, added atomically; a line for each row
//                |  the CTAs of a cluster split K. Each finishes a part of the tile, from the
//                v  shared memory of all.
//   global     the output: scales and the rest of the epilogue
//
// K is permuted alike on both sides: lane 4g + t holds K = 16t to 16t + 15 of a block. Words 2s and
// 2s + 1 of it are the fragments of step s.

#pragma once

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/sm80_imma/activations.cuh"
#include "cuda/kernels/sm80_imma/arguments.h"
#include "cuda/kernels/sm80_imma/rounding.cuh"
#include "cuda/kernels/sm80_imma/schedule.h"

namespace jaxfp8::cuda::imma {

inline constexpr int kWarps = kThreads / 32;
// Groups of copies in flight for each thread.
inline constexpr int kCopiesAhead = 16;

// A CTA's part of the product, and its shared memory.
template <int kRowTiles>
struct Cta {
  static constexpr int kColumnTiles = ColumnTiles(kRowTiles), kColumns = 16 * kColumnTiles;
  static constexpr int kSumPitch = SumPitch(kRowTiles);

  int64_t batch;
  int column, first_depth, depth, pitch;  // depth: of those from first_depth on that exist
  uint8_t* weights;                       // [kColumns, pitch]
  int32_t* sums;                          // [8 * kRowTiles, kSumPitch]
  uint32_t* maxima;                       // [kColumns], codes, of this CTA
  float* amax;                            // [kColumns], of the cluster

  __device__ __forceinline__ explicit Cta(const Arguments& a) {
    extern __shared__ __align__(128) uint8_t imma_shared[];
    batch = blockIdx.z;
    column = blockIdx.x * kColumns;
    first_depth = blockIdx.y * a.split_depth;
    depth = max(0, min(a.split_depth, a.depth - first_depth));
    weights = imma_shared, pitch = WeightPitch(a.split_depth);
    sums = reinterpret_cast<int32_t*>(weights + kColumns * pitch);
    maxima = reinterpret_cast<uint32_t*>(sums + 8 * kRowTiles * kSumPitch);
    amax = reinterpret_cast<float*>(maxima + kColumns);
  }

  // K rounded up to blocks: zeros follow the end.
  __device__ __forceinline__ int Blocks() const { return (depth + kBlockDepth - 1) / kBlockDepth; }
};

// Four words of the shared memory of a CTA of the cluster.
//   from  their place in this CTA's
__device__ __forceinline__ int4 LoadOfRank(const void* from, int rank) {
  if constexpr (!kHasClusters) return *static_cast<const int4*>(from);
  const float4 words = LoadFromRank(SharedAddress(from), rank);
  return make_int4(__float_as_int(words.x), __float_as_int(words.y), __float_as_int(words.z),
                   __float_as_int(words.w));
}

// All threads of the cluster, or of the only CTA.
__device__ __forceinline__ void SyncCluster() {
  if constexpr (kHasClusters) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
  }
}

// A thread's runs of 16 K, to copy and to take the maximum of: a part of one column.
template <int kRowTiles>
struct Runs {
  static constexpr int kThreadsOfColumn = kThreads / Cta<kRowTiles>::kColumns;

  int column, first, count;

  __device__ __forceinline__ explicit Runs(const Cta<kRowTiles>& cta) {
    const int runs = cta.Blocks() * (kBlockDepth / 16);
    column = threadIdx.x / kThreadsOfColumn, first = threadIdx.x % kThreadsOfColumn;
    count = (runs - first + kThreadsOfColumn - 1) / kThreadsOfColumn;
  }
  __device__ __forceinline__ int Depth(int i) const { return 16 * (first + i * kThreadsOfColumn); }
};

// Weights [N, K]: starts the copy of a run, or copies it value by value if it is not aligned.
template <int kRowTiles>
__device__ __forceinline__ void CopyRun(const Arguments& a, const Cta<kRowTiles>& cta, int column,
                                        int k) {
  uint8_t* to = cta.weights + column * cta.pitch + k;
  const int exist = cta.column + column < a.columns ? max(0, min(16, cta.depth - k)) : 0;
  const uint8_t* from = a.weights + cta.batch * a.weight_batch +
                        (cta.column + column) * a.weight_pitch + cta.first_depth + k;
  if (a.weights_aligned) {
    return CopyAsync16(SharedAddress(to), exist > 0 ? from : a.weights, exist);
  }
  uint32_t words[4];
  LoadSome(from, exist, words);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Weights [K, N]: 16 columns of four K, as four K of each column.
template <int kRowTiles>
__device__ __forceinline__ void CopyTransposed(const Arguments& a, const Cta<kRowTiles>& cta,
                                               int column, int k) {
  const uint8_t* from = a.weights + cta.batch * a.weight_batch +
                        (cta.first_depth + k) * a.weight_pitch + cta.column + column;
  const int exist = a.columns - cta.column - column;
  uint32_t lines[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    LoadRun(from + i * a.weight_pitch, k + i < cta.depth ? exist : 0, a.weights_aligned ? 16 : 1,
            lines[i]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t columns[4];
    Transpose4x4Bytes(lines[0][j], lines[1][j], lines[2][j], lines[3][j], columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint8_t* to = cta.weights + (column + 4 * j + i) * cta.pitch + k;
      *reinterpret_cast<uint32_t*>(to) = columns[i];
    }
  }
}

// Copies all weights of the CTA. Returns the largest codes of the thread's column, as
// `LargestCodes`.
template <DType kWeight, bool kMnMajor, int kRowTiles>
__device__ __forceinline__ uint32_t CopyWeights(const Arguments& a, const Cta<kRowTiles>& cta) {
  const Runs<kRowTiles> runs(cta);
  const auto copy = [&](int i) {  // an empty group where nothing is left
    if (i < runs.count) CopyRun(a, cta, runs.column, runs.Depth(i));
    CommitCopies();
  };
  if constexpr (kMnMajor) {
    constexpr int kTiles = Cta<kRowTiles>::kColumnTiles;
    const int units = cta.Blocks() * (kBlockDepth / 4) * kTiles;
#pragma unroll 2  // as registers allow
    for (int i = threadIdx.x; i < units; i += kThreads) {
      CopyTransposed(a, cta, i % kTiles * 16, i / kTiles * 4);
    }
    __syncthreads();
  } else {
#pragma unroll 1
    for (int i = 0; i < kCopiesAhead; ++i) copy(i);
  }
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = 0; i < runs.count; ++i) {
    if constexpr (!kMnMajor) {
      copy(i + kCopiesAhead);
      WaitForCopies<kCopiesAhead>();
    }
    const uint4 run =
        *reinterpret_cast<const uint4*>(cta.weights + runs.column * cta.pitch + runs.Depth(i));
#pragma unroll
    for (const uint32_t word : {run.x, run.y, run.z, run.w}) {
      largest = LargestCodes<kWeight>(word, largest);
    }
  }
  return largest;
}

// Leaves the amax of each column in shared memory, of all K of the cluster.
template <DType kWeight, int kRowTiles>
__device__ __forceinline__ void FindAmax(const Cta<kRowTiles>& cta, uint32_t largest) {
  constexpr int kThreadsOfColumn = Runs<kRowTiles>::kThreadsOfColumn;
#pragma unroll
  for (int apart = 1; apart < kThreadsOfColumn; apart *= 2) {
    largest = LargerHalves(largest, __shfl_xor_sync(~0u, largest, apart));
  }
  if (threadIdx.x % kThreadsOfColumn == 0) {
    cta.maxima[threadIdx.x / kThreadsOfColumn] = max(largest & 0xffffu, largest >> 16);
  }
  SyncCluster();
  if (4 * threadIdx.x < cta.kColumns) {
    int4 codes = {};
    for (int rank = 0; rank < static_cast<int>(CtasInCluster()); ++rank) {
      const int4 others = LoadOfRank(cta.maxima + 4 * threadIdx.x, rank);
      codes = make_int4(max(codes.x, others.x), max(codes.y, others.y), max(codes.z, others.z),
                        max(codes.w, others.w));
    }
    const auto amax_of = [](int code) { return Decode<kWeight>(static_cast<uint8_t>(code)); };
    reinterpret_cast<float4*>(cta.amax)[threadIdx.x] =
        make_float4(amax_of(codes.x), amax_of(codes.y), amax_of(codes.z), amax_of(codes.w));
  }
  __syncthreads();
}

// acc (16 x 8, int32) += a (16 x 32, int8) * b (32 x 8, int8). With g = lane / 4 and t = lane % 4,
// a lane holds, the lowest K in the lowest byte,
//
//   a[0], a[1]      rows g and g + 8 of a,    K = 4t to 4t + 3
//   a[2], a[3]      rows g and g + 8 of a,    K = 4t + 16 to 4t + 19
//   b0, b1          column g of b,            K = 4t to 4t + 3, and 4t + 16 to 4t + 19
//   acc[0], acc[1]  row g of acc,             columns 2t and 2t + 1
//   acc[2], acc[3]  row g + 8 of acc,         columns 2t and 2t + 1
__device__ __forceinline__ void MultiplyCodes(int32_t (&acc)[4], const uint32_t (&a)[4],
                                              uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The lane's 16 K of a block of each row tile; 0 for a missing row, or past the end.
template <int kRowTiles>
__device__ __forceinline__ void LoadCodes(const Arguments& a, const Cta<kRowTiles>& cta, int k,
                                          uint32_t (&codes)[kRowTiles][4]) {
  const int lane = threadIdx.x % 32, row = lane / 4, at = k + lane % 4 * 16;
  const int8_t* from =
      a.codes + cta.batch * a.codes_batch + row * a.codes_pitch + cta.first_depth + at;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    uint4 words = {};
    if (8 * j + row < a.rows && at < cta.depth) {
      words = *reinterpret_cast<const uint4*>(from + 8 * j * a.codes_pitch);
    }
    codes[j][0] = words.x, codes[j][1] = words.y, codes[j][2] = words.z, codes[j][3] = words.w;
  }
}

// Multiplies the warp's blocks of K and adds the products to the sums of the CTA.
template <DType kWeight, int kRowTiles>
__device__ __forceinline__ void Multiply(const Arguments& a, const Cta<kRowTiles>& cta) {
  constexpr int kColumnTiles = Cta<kRowTiles>::kColumnTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Rounding roundings[2 * kColumnTiles];  // of columns g, g + 8, ...
#pragma unroll
  for (int i = 0; i < 2 * kColumnTiles; ++i) {
    roundings[i] = RoundingOf<kWeight>(cta.amax[8 * i + g]);
  }
  int32_t acc[kColumnTiles][kRowTiles][4] = {};
#pragma unroll 1
  for (int block = warp; block < cta.Blocks(); block += kWarps) {
    uint32_t codes[kRowTiles][4];
    LoadCodes(a, cta, block * kBlockDepth, codes);
#pragma unroll
    for (int f = 0; f < kColumnTiles; ++f) {
      uint32_t rounded[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 16 * f + 8 * half + g;
        const uint4 run = *reinterpret_cast<const uint4*>(cta.weights + column * cta.pitch +
                                                          block * kBlockDepth + 16 * t);
        const Rounding& rounding = roundings[2 * f + half];
        rounded[half][0] = Round<kWeight>(run.x, rounding);
        rounded[half][1] = Round<kWeight>(run.y, rounding);
        rounded[half][2] = Round<kWeight>(run.z, rounding);
        rounded[half][3] = Round<kWeight>(run.w, rounding);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t fragment[4] = {rounded[0][2 * step], rounded[1][2 * step],
                                      rounded[0][2 * step + 1], rounded[1][2 * step + 1]};
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          MultiplyCodes(acc[f][j], fragment, codes[j][2 * step], codes[j][2 * step + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kColumnTiles; ++f) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * j + 2 * t + i % 2, column = 16 * f + i / 2 * 8 + g;
        atomicAdd(cta.sums + row * cta.kSumPitch + column, acc[f][j][i]);
      }
    }
  }
}

// Scales four sums of a row, applies the rest of the epilogue and stores them. All
// instances of the kernel share this function.
//   amax  of the columns
inline __device__ __noinline__ void StoreOutputs(const Arguments& a, Quad q, int4 sum,
                                                 float4 amax) {
  const Elementwise& ew = a.elementwise;
  const float row_scale = a.row_scale ? a.row_scale[a.row_tiles.At(q.b, q.r, 0)] : 1.0f;
  float y[4] = {__int2float_rn(sum.x), __int2float_rn(sum.y), __int2float_rn(sum.z),
                __int2float_rn(sum.w)};
  const float amax_of[4] = {amax.x, amax.y, amax.z, amax.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float scale = ScaleOf<DType::kS8>(amax_of[i]);
    if (a.column_scale && i < q.count) {
      scale *= a.column_scale[a.column_tiles.At(q.b, q.c + i, 0)];
    }
    y[i] = y[i] * row_scale * scale;
  }
  float bias[4] = {}, out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (ew.bias_plane) LoadPlane(ew.bias_plane, ew.bias, q, 0.0f, bias);
  if (ew.out_scale_plane) LoadPlane(ew.out_scale_plane, ew.out_scale, q, 1.0f, out_scale);
  const uint32_t largest = ApplyElementwise(ew, q, bias, out_scale, y);
  if (ew.amax_kind != AmaxKind::kOne && ew.amax_kind != AmaxKind::kPerRow) return;
  uint32_t* cell = ew.amax + ew.amax_plane.At(q.b, q.r, 0);
  if (largest > __ldcg(cell)) atomicMax(cell, largest);
}

// Adds up the sums of the cluster and stores the CTA's part of the tile.
template <int kRowTiles>
__device__ __forceinline__ void StoreTile(const Arguments& a, const Cta<kRowTiles>& cta) {
  constexpr int kQuads = Cta<kRowTiles>::kColumns / 4;
  const int ranks = static_cast<int>(CtasInCluster());
  const int first = static_cast<int>(CtaInCluster()) * kThreads + threadIdx.x;
  for (int i = first; i < a.rows * kQuads; i += ranks * kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    if (cta.column + column >= a.columns) continue;
    int4 total = {};
    for (int rank = 0; rank < ranks; ++rank) {
      const int4 sums = LoadOfRank(cta.sums + row * cta.kSumPitch + column, rank);
      total.x += sums.x, total.y += sums.y, total.z += sums.z, total.w += sums.w;
    }
    const Quad q{cta.batch, row, cta.column + column, min(4, a.columns - cta.column - column)};
    StoreOutputs(a, q, total, *reinterpret_cast<const float4*>(cta.amax + column));
  }
}

//   kWeight    e4m3 or e5m2
//   kMnMajor   weights are [K, N]; else [N, K]
//   kRowTiles  rows in units of 8: 1, 2 or 4
template <DType kWeight, bool kMnMajor, int kRowTiles>
__global__ void __launch_bounds__(kThreads, kRowTiles <= 2 ? 3 : 2)
    Sm80Imma(const __grid_constant__ Arguments a) {
  const Cta<kRowTiles> cta(a);
  for (int i = threadIdx.x; i < 8 * kRowTiles * cta.kSumPitch; i += kThreads) cta.sums[i] = 0;
  const uint32_t largest = CopyWeights<kWeight, kMnMajor>(a, cta);
  FindAmax<kWeight>(cta, largest);
  WaitForRows();
  Multiply<kWeight>(a, cta);
  SyncCluster();
  StoreTile(a, cta);
  SyncCluster();  // others may still read this CTA's sums
}

template <DType kWeight, bool kMnMajor>
KernelFunction ForRows(int row_tiles) {
  switch (row_tiles) {
    case 1:
      return Sm80Imma<kWeight, kMnMajor, 1>;
    case 2:
      return Sm80Imma<kWeight, kMnMajor, 2>;
    default:
      return Sm80Imma<kWeight, kMnMajor, 4>;
  }
}

template <DType kWeight>
KernelFunction KernelFor(bool mn_major, int row_tiles) {
  return mn_major ? ForRows<kWeight, true>(row_tiles) : ForRows<kWeight, false>(row_tiles);
}

}  // namespace jaxfp8::cuda::imma
