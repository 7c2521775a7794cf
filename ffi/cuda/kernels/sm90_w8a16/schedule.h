// Which tile shape a product of 8-bit weights and 16-bit values gets, and which tiles are shared.
// Pure. The weights are on the left (`WithWeightsOnLeft`), but where a function says so.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/sm90/schedule.h"

namespace jaxfp8::cuda::sm90 {

// K of a step: values of 128 bytes. K of the finest scales: half a step.
inline constexpr int kMixedDepth = 64, kFineDepth = 32;

inline constexpr TileShape kMixedTileShapes[] = {{128, 256}, {256, 128}, {128, 128}};

// The tiles of the launch. With groups of rows they are those of the output, whose rows are values;
// else of the transposed one. The weights may be on either side.
TileSchedule MakeMixedSchedule(const Problem& problem, const Configuration& configuration);

// Shares units among so many CTAs, where that is estimated to be faster.
void ShareUnits(const Problem& problem, const Configuration& configuration, int32_t ctas,
                TileSchedule& schedule);

// The configuration with the shortest estimated time.
Configuration ChooseMixed(const Problem& problem, int32_t multiprocessors);

// Of the counters of a CTA, one for each of its consumer warpgroups; aligned, as the sums after
// them.
inline constexpr int32_t kCounterBytes = 16;

// Bytes of the workspace that CTAs with shared units need: a counter and the sums of a tile each.
size_t SharedUnitsBytes(const TileSchedule& schedule, TileShape tile, int32_t ctas);

// The most, on the largest device: an H100 has 132 multiprocessors.
inline constexpr size_t kMaxSharedUnitsBytes =
    132 * (kCounterBytes + sizeof(float) * size_t{128} * 256);

}  // namespace jaxfp8::cuda::sm90
