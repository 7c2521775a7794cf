// The copies of `sm80_w8a16` from global to shared memory: a ring of stages (`StagesFor`).
//
//   stage     0           1           2           3
//         [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a] [w 16 KiB|a]    w weights, a activations
//          multiplied   copies in flight .........  refilled once every thread has read it
//
// All threads of the CTA copy and all multiply.

#pragma once

#include <type_traits>

#include "cuda/kernels/common/async_copy.cuh"
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/sm80_w8a16/fine_scales.cuh"
#include "cuda/kernels/sm80_w8a16/load.cuh"
#include "cuda/kernels/sm80_w8a16/schedule.h"

namespace jaxfp8::cuda::w8a16 {

// The ring of stages of a CTA, and its way along K.
//   kActivation    type of the activations
//   kMnMajor       weights are [K, N]; else [N, K]
//   kRowFragments  rows of the tile in units of 8
//   kOrder         of depths
//   kFine          whether a stage has fine scales
template <DType kActivation, bool kMnMajor, int kRowFragments, Order kOrder, bool kFine = false>
class Pipeline {
 public:
  //   depth_tile  the first tile of K
  __device__ __forceinline__ Pipeline(const Arguments& a, const BlockTile& tile, int32_t depth_tile,
                                      uint8_t* stages)
      : a_(a),
        // Weights for several row tiles should stay in L2. Weights for one row tile should not
        // evict the activations.
        policy_(a.schedule.row_tiles == 1 ? ReadOncePolicy() : ReadAgainPolicy()),
        depth_tile_(depth_tile),
        stages_(stages),
        loader_(a, tile, depth_tile),
        scales_(a, tile, depth_tile) {
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) Fill(stage);
  }

  // Waits for the next stage and returns it. It may be read until the next call.
  __device__ __forceinline__ const uint8_t* Next() {
    WaitForCopies<kStages - 2>();
    if constexpr (kFine) scales_.Widen(a_, ScaleSlots(stage_));
    if constexpr (kOrder == Order::kWgmma) FenceAsyncProxy();
    // After this, all threads' copies of this stage have arrived, and no thread still reads the
    // stage to be filled next.
    __syncthreads();
    Fill(stage_ == 0 ? kStages - 1 : stage_ - 1);
    const uint8_t* ready = stages_ + stage_ * kStageBytes;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return ready;
  }

 private:
  static constexpr int kStages = kFine ? kFineStages : StagesFor(kRowFragments);
  static constexpr int kStageBytes = SharedBytes(kRowFragments, kFine) / kStages;
  struct NoLoader {
    __device__ __forceinline__ NoLoader(const Arguments&, const BlockTile&, int32_t) {}
  };

  __device__ __forceinline__ uint8_t* ScaleSlots(int stage) const {
    return stages_ + stage * kStageBytes + StageBytes(kRowFragments);
  }

  // Starts the copies of the next tile of K, if there is one. Commits a group even if it is empty:
  // `Next` counts groups.
  __device__ __forceinline__ void Fill(int stage) {
    if (depth_tile_ < a_.schedule.depth_tiles) {
      uint32_t to = SharedAddress(stages_) + stage * kStageBytes;
      // Computed here, and not again in front of each copy, as the compiler may choose: 16 rows
      // times 28672 x 8192 then took 99 us on an H200 instead of 87.
      asm volatile("" : "+r"(to));
      loader_.LoadWeights(a_, to, policy_);
      loader_.LoadActivations(a_, to + kWeightBytes);
      loader_.Advance(a_);
      if constexpr (kFine) {
        scales_.Load(a_, ScaleSlots(stage));
        scales_.Advance(a_);
      }
      depth_tile_ += a_.schedule.split;
    }
    CommitCopies();
  }

  const Arguments& a_;
  uint64_t policy_;
  int32_t depth_tile_;  // the next to copy
  uint8_t* stages_;
  int stage_ = 0;  // the next to read
  Loader<kActivation, kMnMajor, kRowFragments, kOrder> loader_;
  std::conditional_t<kFine, FineScaleLoader<kMnMajor>, NoLoader> scales_;
};

}  // namespace jaxfp8::cuda::w8a16
