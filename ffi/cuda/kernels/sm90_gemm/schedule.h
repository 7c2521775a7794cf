// Which tile shape a product of 8-bit sides gets in `sm90_gemm`. Pure.

#pragma once

#include <cstdint>

#include "cuda/kernels/sm90/schedule.h"

namespace jaxfp8::cuda::sm90 {

// The tile shapes that kernels are compiled for: with two sets of sums in registers, the scaled
// ones and those of a step; and with one set (`SumsFirst`).
inline constexpr TileShape kTileShapes[] = {{256, 128}, {128, 192}, {128, 128},
                                            {64, 128},  {64, 64},   {64, 32}};
inline constexpr TileShape kSumTileShapes[] = {{128, 256}, {256, 128}, {128, 128},
                                               {64, 128},  {64, 64},   {64, 32}};

// The configuration with the shortest estimated time.
Configuration Choose(const Problem& problem, int32_t multiprocessors);

}  // namespace jaxfp8::cuda::sm90
