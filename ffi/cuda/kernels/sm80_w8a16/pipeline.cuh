// The copies of `sm80_w8a16` from global to shared memory: a ring of StagesFor(kRowFragments)
// stages.
//
//   stage     0           1           2           3
//         [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a]    w weights, a activations
//          multiplied   copies in flight .........  refilled once every thread has read it
//
// All threads of the block copy and all multiply.

#ifndef JAXFP8_CUDA_KERNELS_SM80_W8A16_PIPELINE_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_W8A16_PIPELINE_CUH_

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/load.cuh"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

// An iteration of the schedule: an output tile and a tile of its K.
struct Iteration {
  int32_t output_tile, depth_tile;
  TileCoord coord;

  __device__ __forceinline__ explicit Iteration(const Schedule& schedule, int32_t iteration)
      : output_tile(iteration / schedule.depth_tiles),
        depth_tile(iteration - output_tile * schedule.depth_tiles),
        coord(schedule.CoordOf(output_tile)) {}

  // Goes to the next iteration; returns whether that begins another output tile.
  __device__ __forceinline__ bool Advance(const Schedule& schedule) {
    if (++depth_tile < schedule.depth_tiles) return false;
    depth_tile = 0;
    coord = schedule.CoordOf(++output_tile);
    return true;
  }
};

// The ring of stages of a block.
//   kMnMajor       weights are [K, N]; else [N, K]
//   kRowFragments  rows of the tile in units of 8
//   kPacked        activations were packed by the grid before, see pack_activations.cuh
template <bool kMnMajor, int kRowFragments, bool kPacked>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(const Arguments& a, const Iteration& first, int32_t count,
                                      uint8_t* stages)
      : a_(a),
        // Weights that other row tiles read again should stay in L2. Weights that are read once
        // should not evict the activations.
        policy_(a.schedule.row_tiles == 1 ? ReadOncePolicy() : ReadAgainPolicy()),
        iteration_(first),
        left_(count),
        stages_(stages) {
    loader_.Start(a, first.coord, first.depth_tile);
    if constexpr (kPacked) {
      // The grid before packs the activations. The weights do not depend on it.
      loader_.LoadWeights(a, Address(0), policy_);
      WaitForPrerequisiteGrids();
    }
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) Fill(stage, stage > 0 || !kPacked);
  }

  // Waits for the next stage and returns it. It may be read until the next call.
  __device__ __forceinline__ const uint8_t* Next() {
    WaitForCopies<kStages - 2>();
    if constexpr (kPacked) FenceAsyncProxy();
    // After this, all threads' copies of this stage have arrived, and no thread still reads the
    // stage that is filled next.
    __syncthreads();
    Fill(stage_ == 0 ? kStages - 1 : stage_ - 1, true);
    const uint8_t* ready = stages_ + stage_ * kStageBytes;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return ready;
  }

 private:
  static constexpr int kStages = StagesFor(kRowFragments), kStageBytes = StageBytes(kRowFragments);

  __device__ __forceinline__ uint32_t Address(int stage) const {
    return SharedAddress(stages_) + stage * kStageBytes;
  }

  // Starts the copies of the next iteration, if there is one. Commits a group even if it is empty,
  // so that `Next` can count groups.
  __device__ __forceinline__ void Fill(int stage, bool with_weights) {
    if (left_-- > 0) {
      if (with_weights) loader_.LoadWeights(a_, Address(stage), policy_);
      loader_.LoadActivations(a_, Address(stage) + kWeightBytes);
      loader_.Advance(a_);
      if (iteration_.Advance(a_.schedule)) loader_.Start(a_, iteration_.coord, 0);
    }
    CommitCopies();
  }

  const Arguments& a_;
  uint64_t policy_;
  Iteration iteration_;  // the next to copy
  int32_t left_;         // how many are left to copy
  uint8_t* stages_;
  int stage_ = 0;  // the next to read
  Loader<kMnMajor, kRowFragments, kPacked> loader_;
};

}  // namespace jaxfp8::cuda::w8a16

#endif  // JAXFP8_CUDA_KERNELS_SM80_W8A16_PIPELINE_CUH_
