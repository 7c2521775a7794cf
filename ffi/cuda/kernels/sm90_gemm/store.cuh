// The epilogue of a consumer warpgroup: from the sums in registers to the output.
//
// Sums go through shared memory, of each warp 16 rows x 128 bytes at a time:
//
//   sums in registers                staged                     output
//   lane: 2 columns of rows   --->   [16][128 bytes]   --->     lane: 16 bytes of a row, eight
//   r, r + 8 in every eight          padded                     lanes its 128 bytes
//
//   directly   the sums are cast and nothing else: the staged bytes are those of the output. Of 16
//              bits a warpgroup stages all it has, swizzled, and one thread stores it by copies
//              (TMA), which run while the next tile is multiplied
//   else       32 float32 sums are staged. A lane finishes four columns of four rows at once
//              (row_batch.cuh), or, where those are no aligned fours, of one row (elementwise.cuh)

#pragma once

#include <utility>

#include "cuda/kernels/sm90/arguments.h"
#include "cuda/kernels/sm90/staged.cuh"
#include "cuda/kernels/sm90_gemm/load.cuh"

namespace jaxfp8::cuda::sm90 {

// Stages up to 64 columns as 16-bit values, from register kFirst on.
template <DType kOut, int kFirst, int kStaged, int kCount>
__device__ __forceinline__ void StageHalves(const float (&total)[kCount], uint32_t staged) {
  const int32_t lane = threadIdx.x % 32;
  const uint32_t to = staged + lane % 16 * kNarrowPitch + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < kStaged / 2; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = EncodeWord<kOut>(&total[kFirst + i + 2 * j]);
    StoreMatrices(to + i / 8 * 32, words);
  }
}

// Copies 16 staged rows of kBytes to the output, 16 bytes a lane.
//   to     the first row and column
//   pitch  of the output, in bytes
template <int kBytes, bool kWide>
__device__ __forceinline__ void CopyStaged(uint32_t staged, char* to, int64_t pitch, int32_t rows,
                                           int32_t bytes) {
  constexpr int kLanes = kBytes / 16, kRowsAtOnce = 32 / kLanes;
  constexpr int kPitch = kWide ? kWidePitch : kNarrowPitch;
  const int32_t lane = threadIdx.x % 32;
  const int32_t row = lane / kLanes, at = lane % kLanes * 16;
#pragma unroll
  for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
    const uint32_t from = staged + (row + i) * kPitch + at;
    const uint4 value = kWide ? LoadSums(from) : LoadShared4(from);
    if (row + i < rows && at < bytes) {
      *reinterpret_cast<uint4*>(to + (row + i) * pitch + at) = value;
    }
  }
}

// Casts and stores a wave of float32 sums.
template <DType kOut, int kColumns>
__device__ __forceinline__ void StoreDirectly(const Epilogue& e, const WarpTile& tile,
                                              uint32_t staged, const float (&total)[kColumns / 2]) {
  constexpr int kSize = SizeOf(kOut), kAtOnce = kStagedBytes / kSize;
  constexpr int kStaged = kColumns < kAtOnce ? kColumns : kAtOnce;
  const Plane& plane = e.elementwise.out_plane;
  char* to =
      static_cast<char*>(e.elementwise.out) + plane.At(tile.batch, tile.row, tile.column) * kSize;
  const int32_t rows = tile.end - tile.row;
  const auto bytes = min(static_cast<int32_t>(e.columns) - tile.column, kColumns) * kSize;
  [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
    const auto store = [&]<int kFirst>(std::integral_constant<int, kFirst>) {
      if constexpr (kSize == 2) {
        StageHalves<kOut, kFirst / 2, kStaged>(total, staged);
      } else {
        StageSums<kFirst / 2>(total, staged);
      }
      __syncwarp();
      CopyStaged<kStaged * kSize, kSize == 4>(staged, to + kFirst * kSize, plane.row_stride * kSize,
                                              rows, bytes - kFirst * kSize);
      __syncwarp();
    };
    (store(std::integral_constant<int, kPart * kStaged>{}), ...);
  }(std::make_integer_sequence<int, kColumns / kStaged>{});
}

// Calls `StageSums` for a part of 32 columns that is known at run time. Registers have no index.
template <int kColumns, int kWgmmas, int... kParts>
__device__ __forceinline__ void StagePart(int32_t part, const float (&total)[kWgmmas][kColumns / 2],
                                          uint32_t staged, std::integer_sequence<int, kParts...>) {
  constexpr int kPerWave = kColumns / kStagedColumns;
  (void)((part == kParts &&
          (StageSums<kParts % kPerWave*(kStagedColumns / 2)>(total[kParts / kPerWave], staged),
           true)) ||
         ...);
}

template <DType kOut, typename L, int kColumns>
__device__ __forceinline__ void StoreTileDirectly(const Epilogue& e, WarpTile tile, uint32_t staged,
                                                  const float (&total)[L::kWgmmas][kColumns / 2]) {
#pragma unroll
  for (int w = 0; w < L::kWgmmas; ++w, tile.row += kWgmmaRows) {
    StoreDirectly<kOut, kColumns>(e, tile, staged, total[w]);
  }
}

// Stages a warp's 16 rows of a box, from register kFirst on: chunk c of 16 bytes of row r lies at
// place c ^ r % 8, as `MapOutput` has it.
template <DType kOut, int kFirst, int kCount>
__device__ __forceinline__ void StageBox(const float (&total)[kCount], uint32_t box) {
  const int32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * kWarpRows + lane % 16;
  const uint32_t to = box + row * kStagedBytes + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int i = 0; i < kBoxColumns / 2; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = EncodeWord<kOut>(&total[kFirst + i + 2 * j]);
    StoreMatrices(to ^ i / 8 * 32, words);
  }
}

// Casts and stores the tile of a warpgroup, without waiting for the copies.
template <DType kOut, typename L, int kColumns>
__device__ __forceinline__ void StoreBoxes(const CUtensorMap* out, const WarpTile& tile,
                                           uint32_t staged, int32_t warpgroup,
                                           const float (&total)[L::kWgmmas][kColumns / 2]) {
  constexpr int kOfWave = kColumns / kBoxColumns;
  [&]<int... kBox>(std::integer_sequence<int, kBox...>) {
    (StageBox<kOut, kBox % kOfWave*(kBoxColumns / 2)>(total[kBox / kOfWave],
                                                      staged + kBox * kBoxBytes),
     ...);
  }(std::make_integer_sequence<int, L::kBoxes>{});
  FenceAsyncProxy();
  SynchronizeWarpgroup(warpgroup);
  if (threadIdx.x % kWarpgroupThreads == 0) {
#pragma unroll
    for (int i = 0; i < L::kBoxes; ++i) {
      StoreBox(out, staged + i * kBoxBytes, tile.column + i % kOfWave * kBoxColumns,
               tile.row + i / kOfWave * kWgmmaRows, tile.batch);
    }
    CommitStores();
  }
}

// The epilogue of a warpgroup's rows of a tile, whose sums are scaled already.
//   of_warpgroup  its first rows
//   staging   its shared memory
template <typename L, int kColumns>
__device__ __forceinline__ void StoreTile(const Arguments& a, const CUtensorMap* out,
                                          const WarpTile& of_warpgroup, uint32_t staging,
                                          int32_t warpgroup,
                                          const float (&total)[L::kWgmmas][kColumns / 2]) {
  const Epilogue& e = a.epilogue;
  if constexpr (L::kBoxes > 0) {
    if (a.stores_boxes) {  // the copies of the last tile may still read what it staged
      if (threadIdx.x % kWarpgroupThreads == 0) WaitForStores<0>();
      SynchronizeWarpgroup(warpgroup);
    }
    // Boxes that reach beyond a group of rows would overwrite the next one. What reaches beyond the
    // output is not stored.
    const bool fits = of_warpgroup.row + L::kWgmmas * kWgmmaRows <= of_warpgroup.end;
    if (a.stores_boxes && (fits || of_warpgroup.end == e.rows)) {
      const WarpTile at{a.out_batched ? of_warpgroup.batch : 0, of_warpgroup.row,
                        of_warpgroup.column};
      if (e.elementwise.out_plane.dtype == DType::kBF16) {
        return StoreBoxes<DType::kBF16, L, kColumns>(out, at, staging, warpgroup, total);
      }
      return StoreBoxes<DType::kF16, L, kColumns>(out, at, staging, warpgroup, total);
    }
  }
  const int32_t warp = threadIdx.x / 32 % 4;
  const uint32_t staged = staging + warp * L::kStagingBytes;
  const WarpTile tile{of_warpgroup.batch, of_warpgroup.row + warp * kWarpRows, of_warpgroup.column,
                      of_warpgroup.end};
  if (a.stores_directly) {
    switch (e.elementwise.out_plane.dtype) {
      case DType::kBF16:
        return StoreTileDirectly<DType::kBF16, L, kColumns>(e, tile, staged, total);
      case DType::kF16:
        return StoreTileDirectly<DType::kF16, L, kColumns>(e, tile, staged, total);
      default:
        return StoreTileDirectly<DType::kF32, L, kColumns>(e, tile, staged, total);
    }
  }
  constexpr int kPerWave = kColumns / kStagedColumns, kAll = L::kWgmmas * kPerWave;
  uint32_t largest = 0;
#pragma unroll 1
  for (int32_t part = 0; part < kAll; ++part) {
    StagePart<kColumns>(part, total, staged, std::make_integer_sequence<int, kAll>{});
    __syncwarp();
    const WarpTile wave{tile.batch, tile.row + part / kPerWave * kWgmmaRows, tile.column, tile.end};
    const uint32_t seen = a.stores_fours ? StoreStagedRows<>(e, wave, part % kPerWave, staged)
                                         : StoreStaged<>(e, wave, part % kPerWave, staged);
    largest = max(largest, seen);
    __syncwarp();
  }
  UpdateMatrixAmax(e.elementwise, tile.batch, largest);
}

}  // namespace jaxfp8::cuda::sm90
