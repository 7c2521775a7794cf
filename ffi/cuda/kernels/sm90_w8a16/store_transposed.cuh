// The epilogue of a consumer warpgroup whose tile is the transposed output: rows of weights are
// columns of the output.
//
// A warpgroup transposes a wave in shared memory, a part of its columns at a time:
//
//   sums in registers                  staged                            output
//   64 rows x 64 columns   directly  [64 columns][64 rows, 16 bits]     all of it (TMA)
//   64 rows x 32 columns   else      [32 columns][64 rows, float32]     a warp: 16 x 32 (store.cuh)

#pragma once

#include "cuda/kernels/sm90/staged.cuh"
#include "cuda/kernels/sm90_w8a16/shared_units.cuh"

namespace jaxfp8::cuda::sm90 {

// A warpgroup has four boxes of a tile, and stages three of them without waiting.
inline constexpr int kTransposedBuffers = 3;
// Columns of a tile, and so rows of the output, that are staged at a time but for `StoreBox`.
inline constexpr int kSumsStaged = 32;
// From row to row of staged sums, in bytes: then eight values of each of four pairs of rows are in
// different banks.
inline constexpr int kSumPitch = 4 * kWgmmaRows + 16;
static_assert(kSumsStaged * kSumPitch <= kTransposedBuffers * kBoxBytes);

__device__ __forceinline__ void StoreMatricesTransposed(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stages 64 columns of a warp's 16 rows, from register kFirst on, as 16-bit values: lines of 128
// bytes, in which chunk c of 16 of line i lies at place c ^ i % 8, as `MapOutput` has it.
template <DType kOut, int kFirst, int kCount>
__device__ __forceinline__ void StageTransposed(const float (&total)[kCount], uint32_t staged) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // A lane has the address of column lane % 8 of matrix lane / 8: rows 0 to 7, rows 8 to 15, and
  // the same of the next eight columns.
  const int32_t chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  const uint32_t to = staged + (lane / 16 * 8 + lane % 8) * kStagedBytes + 16 * chunk;
#pragma unroll
  for (int i = 0; i < kBoxColumns / 2; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = EncodeWord<kOut>(&total[kFirst + i + 2 * j]);
    StoreMatricesTransposed(to + 2 * i * kStagedBytes, words);
  }
}

// The same where a thread's two rows are neighbours.
template <DType kOut, int kFirst, int kCount>
__device__ __forceinline__ void StageRowPairs(const float (&total)[kCount], uint32_t staged) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int32_t column = lane % 4 * 2, chunk = (2 * warp + lane / 16) ^ column;
  const uint32_t to = staged + column * kStagedBytes + 16 * chunk + lane / 4 % 4 * 4;
#pragma unroll
  for (int i = 0; i < kBoxColumns / 2; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float rows[2] = {total[kFirst + i + j], total[kFirst + i + j + 2]};
      StoreShared((to + j * kStagedBytes ^ 16 * j) + 2 * i * kStagedBytes,
                  static_cast<int32_t>(EncodeWord<kOut>(rows)));
    }
  }
}

// Stores the first rows of a staged box; the box would overwrite those of the next group.
//   at  the box in the output
inline __device__ void StoreBoxRows(const Epilogue& e, const WarpTile& at, uint32_t box) {
  constexpr int kChunks = kStagedBytes / 16;
  const Plane& plane = e.elementwise.out_plane;
  char* to = static_cast<char*>(e.elementwise.out) + 2 * plane.At(at.batch, at.row, at.column);
#pragma unroll 1
  for (int32_t i = threadIdx.x % kWarpgroupThreads; i < (at.end - at.row) * kChunks;
       i += kWarpgroupThreads) {
    const int32_t row = i / kChunks, chunk = i % kChunks;
    if (at.column + 8 * chunk >= e.columns) continue;
    *reinterpret_cast<uint4*>(to + 2 * row * plane.row_stride + 16 * chunk) =
        LoadShared4(box + row * kStagedBytes + (chunk ^ row % 8) * 16);
  }
}

// Casts and stores the tile of a warpgroup, without waiting for the last copies.
//   tile  of the output: its rows, and the column of the warpgroup's first row of weights
template <DType kOut, typename L, int kColumns>
__device__ __forceinline__ void StoreTransposedDirectly(
    const Arguments& a, const CUtensorMap* out, const WarpTile& tile, uint32_t staged,
    int32_t warpgroup, bool mn_major, const float (&total)[L::kWgmmas][kColumns / 2]) {
  constexpr int kParts = kColumns / kBoxColumns;
  const bool stores = threadIdx.x % kWarpgroupThreads == 0;
  [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
    const auto store = [&]<int kIndex>(std::integral_constant<int, kIndex>) {
      constexpr int kWave = kIndex / kParts, kFirst = kIndex % kParts * kBoxColumns;
      const uint32_t buffer = staged + kIndex % kTransposedBuffers * kBoxBytes;
      if (kIndex == 0 || kIndex >= kTransposedBuffers) {
        if (stores) WaitForStores<kIndex == 0 ? 0 : kTransposedBuffers - 1>();
        SynchronizeWarpgroup(warpgroup);
      }
      if (mn_major) {
        StageRowPairs<kOut, kFirst / 2>(total[kWave], buffer);
      } else {
        StageTransposed<kOut, kFirst / 2>(total[kWave], buffer);
      }
      FenceAsyncProxy();
      SynchronizeWarpgroup(warpgroup);
      const WarpTile box{a.out_batched ? tile.batch : 0, tile.row + kFirst,
                         tile.column + kWave * kWgmmaRows, tile.end};
      if (box.row + kBoxColumns <= box.end || box.end == a.epilogue.rows) {
        if (stores) StoreBox(out, buffer, box.column, box.row, box.batch);
      } else {
        StoreBoxRows(a.epilogue, box, buffer);
      }
      if (stores) CommitStores();
    };
    (store(std::integral_constant<int, kPart>{}), ...);
  }(std::make_integer_sequence<int, kParts * L::kWgmmas>{});
}

// Stages 32 columns of a warp's 16 rows, from register kFirst on, each pair of rows in reverse
// (`LoadSums`).
//   mn_major  a thread's rows are such a pair
template <int kFirst, int kCount>
__device__ __forceinline__ void StageSumsTransposed(bool mn_major, const float (&total)[kCount],
                                                    uint32_t staged) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, line = lane / 4;
  const int32_t row = warp * kWarpRows + ((mn_major ? 2 * line : line) ^ 1);
  const int32_t second = mn_major ? -4 : 8 * 4;
  const uint32_t to = staged + lane % 4 * 2 * kSumPitch + 4 * row;
#pragma unroll
  for (int i = 0; i < kSumsStaged / 2; ++i) {
    StoreShared(to + (i / 4 * 8 + i % 2) * kSumPitch + i % 4 / 2 * second, total[kFirst + i]);
  }
}

// Calls `StageSumsTransposed` for a part of 32 columns that is known at run time.
template <int kColumns, int kWgmmas, int... kParts>
__device__ __forceinline__ void StagePartTransposed(int32_t part, bool mn_major,
                                                    const float (&total)[kWgmmas][kColumns / 2],
                                                    uint32_t staged,
                                                    std::integer_sequence<int, kParts...>) {
  constexpr int kPerWave = kColumns / kSumsStaged;
  (void)((part == kParts && (StageSumsTransposed<kParts % kPerWave*(kSumsStaged / 2)>(
                                 mn_major, total[kParts / kPerWave], staged),
                             true)) ||
         ...);
}

// The epilogue of a warpgroup's rows of a tile, whose sums are scaled already.
//   row, column  of the output
template <typename L, int kColumns>
__device__ __forceinline__ void StoreTransposed(const Arguments& a, const CUtensorMap* out,
                                                const WarpTile& tile, uint32_t staged,
                                                int32_t warpgroup,
                                                const float (&total)[L::kWgmmas][kColumns / 2]) {
  const Epilogue& e = a.epilogue;
  const bool mn_major = a.weights.mn_major;
  if (a.stores_directly) {
    if (e.elementwise.out_plane.dtype == DType::kBF16) {
      StoreTransposedDirectly<DType::kBF16, L, kColumns>(a, out, tile, staged, warpgroup, mn_major,
                                                         total);
    } else {
      StoreTransposedDirectly<DType::kF16, L, kColumns>(a, out, tile, staged, warpgroup, mn_major,
                                                        total);
    }
    return;
  }
  constexpr int kPerWave = kColumns / kSumsStaged, kAll = L::kWgmmas * kPerWave;
  // Two warps have the upper 16 of the staged rows, and each of them 32 columns.
  const int32_t warp = threadIdx.x / 32 % 4, half = warp / 2 * kWarpRows, across = warp % 2;
  const uint32_t from = staged + half * kSumPitch + across * kStagedBytes;
  uint32_t largest = 0;
#pragma unroll 1
  for (int32_t part = 0; part < kAll; ++part) {
    StagePartTransposed<kColumns>(part, mn_major, total, staged,
                                  std::make_integer_sequence<int, kAll>{});
    SynchronizeWarpgroup(warpgroup);
    const WarpTile at{tile.batch, tile.row + part % kPerWave * kSumsStaged + half,
                      tile.column + part / kPerWave * kWgmmaRows, tile.end};
    const uint32_t seen = a.stores_fours ? StoreStagedRows<kSumPitch>(e, at, across, from)
                                         : StoreStaged<kSumPitch>(e, at, across, from);
    largest = max(largest, seen);
    SynchronizeWarpgroup(warpgroup);
  }
  UpdateMatrixAmax(e.elementwise, tile.batch, largest);
}

}  // namespace jaxfp8::cuda::sm90
