// One cuBLASLt call. Sizes, types and scale modes are fixed when it is planned, pointers are given
// when it runs. Column-major, as the library is.

#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "common/status.h"
#include "cuda/device.h"

namespace jaxfp8::cuda {

struct CublasLt;

// D (m x n) = scale_a scale_b A^T B (+ C, of D's type and layout) with A (k x m) and B (k x n).
// With `plain_a` A is (m x k); with `transposed_b` B is (n x k).
struct MatmulShape {
  cudaDataType_t a = CUDA_R_32F, b = CUDA_R_32F, d = CUDA_R_32F;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0;  // elements from column to column
  bool plain_a = false, transposed_b = false;
  int64_t batch = 1, batch_a = 0, batch_b = 0, batch_d = 0;  // strides in elements
  bool scale_a = false, scale_b = false;                     // there is a scale; else it is 1
  cublasLtMatmulMatrixScale_t mode_a = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  cublasLtMatmulMatrixScale_t mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  bool add_c = false;
  bool relu = false;  // after C is added
  // FP8 output: multiplied by a number on the device. The amax, if asked for, is taken before that.
  bool scale_d = false, amax_d = false;
  bool fast = false;  // FP8: accumulate in the tensor cores' own precision
};

struct MatmulBuffers {
  const void *a = nullptr, *b = nullptr;
  const float *scale_a = nullptr, *scale_b = nullptr;
  const float* scale_d = nullptr;
  float* amax_d = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// The alignment of every pointer and pitch, in bytes. Hopper's TMA and the FP8 and INT8 kernels of
// every device need it.
inline constexpr int kMatmulAlignment = 16;

class Matmul {
 public:
  // Fails if the library has no algorithm for the shape on this device. Of several algorithms it
  // takes the one that the plan file names, else the fastest if the device may be
  // used for timing, else the library's first choice.
  static Status Make(const Device& device, const MatmulShape& shape, size_t workspace_bytes,
                     std::unique_ptr<const Matmul>& matmul);

  Status Run(const MatmulBuffers& buffers, cudaStream_t stream) const;

  const MatmulShape& shape() const { return shape_; }

 private:
  Matmul() = default;

  Status Describe(const MatmulBuffers* buffers, cublasLtMatmulDescOpaque_t& to) const;
  Status MakeLayouts();
  Status AskHeuristic(size_t workspace_bytes, std::vector<cublasLtMatmulAlgo_t>& found) const;
  const void* Scalar(bool one) const;
  Status Choose(const Device& device, size_t workspace_bytes);
  bool Fits(cublasLtMatmulAlgo_t algorithm, size_t workspace_bytes) const;
  Status RunWith(const cublasLtMatmulAlgo_t& algorithm, const MatmulBuffers& buffers,
                 cudaStream_t stream) const;

  const CublasLt* api_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  MatmulShape shape_;
  cublasLtMatrixLayoutOpaque_t a_{}, b_{}, c_{}, d_{};
  cublasLtMatmulAlgo_t algorithm_{};
};

// tune.cc times several algorithms for one product and picks the fastest.

// Runs the product once with an algorithm.
using RunAlgorithm =
    std::function<Status(const cublasLtMatmulAlgo_t&, const MatmulBuffers&, cudaStream_t)>;

// Whether a product takes long enough for timing to tell algorithms apart.
bool WorthTiming(const MatmulShape& shape);

// The index of the fastest algorithm, -1 if there is no memory for timing. It uses buffers of its
// own: the program still needs the data in its buffers, and data affects the time.
int Fastest(const MatmulShape& shape, size_t workspace_bytes,
            const std::vector<cublasLtMatmulAlgo_t>& algorithms, const RunAlgorithm& run);

}  // namespace jaxfp8::cuda
