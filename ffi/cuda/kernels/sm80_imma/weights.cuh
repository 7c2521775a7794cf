// Weights of `sm80_imma`, from a stage in shared memory to B fragments of int8.
//
//   [N, K]: CodeTile<128>                       [K, N]: TransposedTile
//     ldmatrix: a lane gets 4 K of a column       ld.shared: a lane gets 4 columns of a K, 4 times
//        |                                           |  Transpose4x4Bytes: 4 K of each column
//        +------> Requantize, with the parameters <--+
//                 of the lane's four columns
//                    |
//                 b[j][h]: column 4g + j of the warp, K = 4t + 16h to 4t + 16h + 3

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_WEIGHTS_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_WEIGHTS_CUH_

#include <type_traits>

#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/sm80_imma/lines.cuh"
#include "cuda/kernels/sm80_imma/load.cuh"

namespace jaxfp8::cuda::imma {

//   kType     e4m3 or e5m2
//   kMnMajor  the weights are [K, N]; else [N, K]
template <DType kType, bool kMnMajor>
class Weights {
 public:
  using Layout = std::conditional_t<kMnMajor, TransposedTile, CodeTile<kTileColumns>>;
  using Source = Copier<Layout, kMnMajor>;

  JAXFP8_DEVICE Weights(const Arguments& a, int64_t batch, int first_column) {
    const int column =
        first_column + ThreadIndex() / 32 * kWarpColumns + ThreadIndex() % 32 / 4 * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) columns_[j] = LoadLine(a.weights, batch, column + j, a.columns);
  }

  // Loads the fragments of one step of a stage.
  JAXFP8_DEVICE void Load(uint32_t stage, int step, uint32_t (&b)[4][2]) const {
    if constexpr (kMnMajor) {
      LoadTransposed(stage, step, b);
    } else {
      LoadLines(stage, step, b);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) b[j][h] = Requantize<kType>({b[j][h]}, columns_[j]);
    }
  }

 private:
  // Two fragments in one instruction: a matrix is a fragment's eight columns x 16 K.
  JAXFP8_DEVICE static void LoadLines(uint32_t stage, int step, uint32_t (&b)[4][2]) {
    const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const int row = warp * kWarpColumns + (j + lane / 16) * 8 + lane % 8;
      uint32_t words[4];
      LoadMatrices(stage + Layout::At(row, 2 * step + lane / 8 % 2), words);
      b[j][0] = words[0], b[j][1] = words[1], b[j + 1][0] = words[2], b[j + 1][1] = words[3];
    }
  }

  JAXFP8_DEVICE static void LoadTransposed(uint32_t stage, int step, uint32_t (&b)[4][2]) {
    const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
    const int chunk = warp * 2 + lane / 16, byte = lane / 4 % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int depth = step * kStepDepth + h * 16 + lane % 4 * 4;
      uint32_t words[4][1], columns[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        LoadShared(stage + Layout::At(depth + i, chunk) + byte, words[i]);
      }
      Transpose4x4Bytes(words[0][0], words[1][0], words[2][0], words[3][0], columns);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][h] = columns[j];
    }
  }

  Divisor columns_[4];
};

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_WEIGHTS_CUH_
