// The kernels for x86 with AMX, whose instructions multiply tiles.

#define JAXFP8_ISA amx
#define JAXFP8_VBMI
#define JAXFP8_AMX

#include "cpu/kernels/amx/microkernel.h"
#include "cpu/kernels/amx/pack_and_multiply.h"
#include "cpu/kernels/amx/skinny.h"
#include "cpu/kernels/isa/entry.h"
#include "cpu/kernels/policy/bf16_pairs.h"
#include "cpu/kernels/policy/int8_quads.h"

namespace jaxfp8::amx {

// A kernel for panels of `Policy`.
template <class Policy>
constexpr Kernel TileEntry(const char* name, unsigned needs, Sums sums) {
  Kernel kernel = Entry<Policy>(name, needs, sums);
  kernel.rows = 2 * kTile;
  kernel.height = kTile;
  kernel.group = kTile * Policy::kGroup;
  kernel.slice = 2 * kSlice<Policy::kGroup>;
  // Few roundings: a tile's products are summed before they are added.
  kernel.depth = 4096;
  // Products are so fast that packing rows again tells.
  kernel.room = {.rows = 4 << 20, .along = 7 << 18, .sums = 2 << 20};
  // Across the depth, what more rows find passes through L2 for every few lines, and packed columns
  // cost less. Integers are packed by so many lines that memory does not keep up: 5 and 8 rows from
  // there took 2.1 times as long so as packed by the first rows, from a cache 0.9 to 1. Along the
  // depth, rows are read again for every two tiles of columns, out of an L2 of 2 MB: 128 rows of
  // bfloat16 that leave it took 1.1 times as long as packed columns, in rounds that do not 0.7 to
  // 0.85 times. What is found is added in float64 for every chunk: 64 rows of integers in chunks of
  // 128 took 1.2 times as long so.
  kernel.few = {.rows = kMostTurned,
                .across = Policy::kExact ? 0 : kTile / 2,
                .along = kMostTurned,
                .prepared = kTile,
                .least_along = 2 * kTile,
                .depth_along = 8,
                .narrow_along = true,
                .spare = kTile,
                .tiles = {}};
  kernel.multiply_few = MultiplyFewByTiles<Policy>;
  // With fewer rows other kernels wait for memory or for lookups as long as tiles do.
  kernel.least = {.across = 3, .along = 2, .prepared = 2};
  if (Policy::kExact) kernel.least = {kFewRows + 1, kFewRows + 1, kFewRows + 1};
  // A multiple of `group`. Deeper strips leave L1: 12 to 48 rows of bfloat16 take 1.1 to 1.3 times
  // as long with 512 lines. With 192 rows int8 takes 1.04 times as long as packed ahead, with 256
  // both do; columns along the depth and prepared ones 0.86 to 1.09 times. (Xeon with AMX.)
  kernel.by_first_rows = {.depth = 256, .rows = Policy::kExact ? 128 : 192, .quads = false};
  kernel.enter = EnterTiles;
  kernel.leave = LeaveTiles;
  kernel.pack_rows = PackTileRows<Policy>;
  kernel.pack_rows_along = PackTurnedRows<Policy>;
  kernel.pack_columns = PackTileColumns<Policy>;
  kernel.multiply = MultiplyTiles<Policy>;
  kernel.pack_and_multiply = PackAndMultiplyTiles<Policy>;
  if (Policy::kAsPrepared != DType::kNone) kernel.multiply_in_place = MultiplyTiles<Policy>;
  return kernel;
}

constexpr unsigned kNeeds = kAvx512 | kAvx512Vbmi | kAvx512Vnni | kAvx512Bf16 | kAmx;

constexpr Kernel kKernels[] = {
    TileEntry<SignedByteSums>("amx_int8", kNeeds, Sums::kInteger),
    TileEntry<BF16Sums>("amx_bf16", kNeeds, Sums::kBFloat16),
};

KernelList Kernels() { return {std::begin(kKernels), std::end(kKernels)}; }

}  // namespace jaxfp8::amx
