#include "cuda/cublaslt/matmul.h"

#include <utility>

#include "cuda/cublaslt/api.h"
#include "cuda/cublaslt/plan_file.h"

namespace jaxfp8::cuda {
namespace {

// The library lists algorithms by estimated speed, never more than 8. Later ones are up to 1.1x
// faster than the first (INT8, bfloat16); most FP8 modes have only one. Never try an algorithm
// listed for another size or mode: `cublasLtMatmulAlgoCheck` accepts tiles with wrong reads of
// block scales (cuBLAS 13.1, H200).
constexpr int kCandidates = 8;

bool Integer(const MatmulShape& shape) { return shape.d == CUDA_R_32I; }

// The type of C. For an FP8 output it has 16 bits, also if nothing is added.
cudaDataType_t TypeOfC(const MatmulShape& shape) {
  const bool eight = shape.d == CUDA_R_8F_E4M3 || shape.d == CUDA_R_8F_E5M2;
  return eight ? CUDA_R_16BF : shape.d;
}

// Sets attributes and remembers the first error.
class Setter {
 public:
  Setter(const CublasLt& api, cublasLtMatmulDesc_t to) : api_(api), to_(to) {}

  template <typename T>
  void operator()(cublasLtMatmulDescAttributes_t attribute, T value) {
    if (!status_.ok()) return;
    status_ = CublasLtError(api_.MatmulDescSetAttribute(to_, attribute, &value, sizeof(value)),
                            "cublasLtMatmulDescSetAttribute");
  }

  const Status& status() const { return status_; }

 private:
  const CublasLt& api_;
  cublasLtMatmulDesc_t to_;
  Status status_;
};

Status MakeLayout(const CublasLt& api, cudaDataType_t type, int64_t rows, int64_t columns,
                  int64_t pitch, int64_t batch, int64_t stride, cublasLtMatrixLayoutOpaque_t& to) {
  JAXFP8_RETURN_IF_ERROR(
      CublasLtError(api.MatrixLayoutInit(&to, sizeof(to), type, rows, columns, pitch),
                    "cublasLtMatrixLayoutInit"));
  if (batch == 1) return {};
  const auto count = static_cast<int32_t>(batch);
  JAXFP8_RETURN_IF_ERROR(CublasLtError(
      api.MatrixLayoutSetAttribute(&to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
      "cublasLtMatrixLayoutSetAttribute"));
  return CublasLtError(
      api.MatrixLayoutSetAttribute(&to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                   sizeof(stride)),
      "cublasLtMatrixLayoutSetAttribute");
}

Status MakePreference(const CublasLt& api, size_t workspace_bytes,
                      cublasLtMatmulPreferenceOpaque_t& to) {
  Status status =
      CublasLtError(api.MatmulPreferenceInit(&to, sizeof(to)), "cublasLtMatmulPreferenceInit");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (!status.ok()) return;
    status = CublasLtError(api.MatmulPreferenceSetAttribute(&to, attribute, &value, sizeof(value)),
                           "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
  // Split-K partial sums are added in float32, never in the output's type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (auto side :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(side, static_cast<uint32_t>(kMatmulAlignment));
  }
  return status;
}

// The key of an algorithm in the plan file: everything it depends on, in one word.
std::string NameOf(const MatmulShape& s, const Device& device, size_t workspace_bytes) {
  std::string name = "sm" + std::to_string(device.compute_capability);
  const int64_t numbers[] = {device.multiprocessors,
                             device.cublaslt_version,
                             s.a,
                             s.b,
                             s.d,
                             s.m,
                             s.n,
                             s.k,
                             s.lda,
                             s.ldb,
                             s.ldd,
                             s.plain_a,
                             s.transposed_b,
                             s.batch,
                             s.batch_a,
                             s.batch_b,
                             s.batch_d,
                             s.scale_a,
                             s.scale_b,
                             s.mode_a,
                             s.mode_b,
                             s.fast,
                             s.add_c,
                             s.relu,
                             s.scale_d,
                             s.amax_d,
                             static_cast<int64_t>(workspace_bytes)};
  for (int64_t number : numbers) name += "_" + std::to_string(number);
  return name;
}

}  // namespace

Status Matmul::Make(const Device& device, const MatmulShape& shape, size_t workspace_bytes,
                    std::unique_ptr<const Matmul>& matmul) {
  std::unique_ptr<Matmul> made(new Matmul);
  made->shape_ = shape;
  JAXFP8_RETURN_IF_ERROR(OpenCublasLt(made->api_));
  JAXFP8_RETURN_IF_ERROR(CublasLtHandle(device.ordinal, made->handle_));
  JAXFP8_RETURN_IF_ERROR(made->MakeLayouts());
  JAXFP8_RETURN_IF_ERROR(made->Choose(device, workspace_bytes));
  matmul = std::move(made);
  return {};
}

Status Matmul::MakeLayouts() {
  const MatmulShape& s = shape_;
  auto a = std::pair(s.k, s.m), b = std::pair(s.k, s.n);
  if (s.plain_a) std::swap(a.first, a.second);
  if (s.transposed_b) std::swap(b.first, b.second);
  JAXFP8_RETURN_IF_ERROR(MakeLayout(*api_, s.a, a.first, a.second, s.lda, s.batch, s.batch_a, a_));
  JAXFP8_RETURN_IF_ERROR(MakeLayout(*api_, s.b, b.first, b.second, s.ldb, s.batch, s.batch_b, b_));
  JAXFP8_RETURN_IF_ERROR(MakeLayout(*api_, s.d, s.m, s.n, s.ldd, s.batch, s.batch_d, d_));
  return MakeLayout(*api_, TypeOfC(s), s.m, s.n, s.ldd, s.batch, s.batch_d, c_);
}

// Makes the descriptor of one query or call. It holds the scales' pointers, so concurrent calls
// cannot share one: each makes its own in the caller's memory.
Status Matmul::Describe(const MatmulBuffers* buffers, cublasLtMatmulDescOpaque_t& to) const {
  const MatmulShape& s = shape_;
  const auto compute = Integer(s) ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F;
  const auto scale = Integer(s) ? CUDA_R_32I : CUDA_R_32F;
  JAXFP8_RETURN_IF_ERROR(CublasLtError(api_->MatmulDescInit(&to, sizeof(to), compute, scale),
                                       "cublasLtMatmulDescInit"));
  Setter set(*api_, &to);
  set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(s.plain_a ? CUBLAS_OP_N : CUBLAS_OP_T));
  set(CUBLASLT_MATMUL_DESC_TRANSB,
      static_cast<int32_t>(s.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N));
  if (s.fast) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  if (s.relu) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_RELU));
  }
  // The heuristic needs pointers too: without one it assumes a scale of 1, in any mode.
  alignas(kMatmulAlignment) static float stand_in = 1;
  if (s.scale_a) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(s.mode_a));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, buffers ? buffers->scale_a : &stand_in);
  }
  if (s.scale_b) {
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(s.mode_b));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, buffers ? buffers->scale_b : &stand_in);
  }
  if (s.scale_d) {
    set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, buffers ? buffers->scale_d : &stand_in);
  }
  if (s.amax_d) set(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, buffers ? buffers->amax_d : &stand_in);
  return set.status();
}

Status Matmul::AskHeuristic(size_t workspace_bytes,
                            std::vector<cublasLtMatmulAlgo_t>& found) const {
  cublasLtMatmulDescOpaque_t description;
  JAXFP8_RETURN_IF_ERROR(Describe(nullptr, description));
  cublasLtMatmulPreferenceOpaque_t preference;
  JAXFP8_RETURN_IF_ERROR(MakePreference(*api_, workspace_bytes, preference));
  cublasLtMatrixLayoutOpaque_t a = a_, b = b_, c = c_, d = d_;
  cublasLtMatmulHeuristicResult_t results[kCandidates];
  int count = 0;
  JAXFP8_RETURN_IF_ERROR(
      CublasLtError(api_->MatmulAlgoGetHeuristic(handle_, &description, &a, &b, &c, &d, &preference,
                                                 kCandidates, results, &count),
                    "cublasLtMatmulAlgoGetHeuristic"));
  for (int i = 0; i < count; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) found.push_back(results[i].algo);
  }
  if (!found.empty()) return {};
  return "`cublasLtMatmulAlgoGetHeuristic` knows no algorithm for this product";
}

bool Matmul::Fits(cublasLtMatmulAlgo_t algorithm, size_t workspace_bytes) const {
  cublasLtMatmulDescOpaque_t description;
  if (!Describe(nullptr, description).ok()) return false;
  cublasLtMatrixLayoutOpaque_t a = a_, b = b_, c = c_, d = d_;
  cublasLtMatmulHeuristicResult_t result;
  const cublasStatus_t status =
      api_->MatmulAlgoCheck(handle_, &description, &a, &b, &c, &d, &algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes;
}

Status Matmul::Choose(const Device& device, size_t workspace_bytes) {
  const std::string product = NameOf(shape_, device, workspace_bytes);
  if (RecallAlgorithm(product, algorithm_) && Fits(algorithm_, workspace_bytes)) return {};
  std::vector<cublasLtMatmulAlgo_t> found;
  JAXFP8_RETURN_IF_ERROR(AskHeuristic(workspace_bytes, found));
  algorithm_ = found[0];
  if (!device.may_time || found.size() == 1 || !WorthTiming(shape_)) return {};
  const int fastest = Fastest(shape_, workspace_bytes, found,
                              [this](const auto& algorithm, const auto& buffers, auto stream) {
                                return RunWith(algorithm, buffers, stream);
                              });
  if (fastest < 0) return {};
  algorithm_ = found[fastest];
  KeepAlgorithm(product, algorithm_);
  return {};
}

Status Matmul::Run(const MatmulBuffers& buffers, cudaStream_t stream) const {
  return RunWith(algorithm_, buffers, stream);
}

Status Matmul::RunWith(const cublasLtMatmulAlgo_t& algorithm, const MatmulBuffers& buffers,
                       cudaStream_t stream) const {
  cublasLtMatmulDescOpaque_t description;
  JAXFP8_RETURN_IF_ERROR(Describe(&buffers, description));
  // The library takes layouts by pointers to non-const.
  cublasLtMatrixLayoutOpaque_t a = a_, b = b_, c = c_, d = d_;
  const void* c_values = shape_.add_c                  ? buffers.c
                         : TypeOfC(shape_) == shape_.d ? buffers.d
                                                       : nullptr;
  return CublasLtError(api_->Matmul(handle_, &description, Scalar(true), buffers.a, &a, buffers.b,
                                    &b, Scalar(shape_.add_c), c_values, &c, buffers.d, &d,
                                    &algorithm, buffers.workspace, buffers.workspace_bytes, stream),
                       "cublasLtMatmul");
}

// Alpha or beta, 0 or 1, in the accumulators' type.
const void* Matmul::Scalar(bool one) const {
  static const float floats[] = {0, 1};
  static const int32_t integers[] = {0, 1};
  return Integer(shape_) ? static_cast<const void*>(&integers[one]) : &floats[one];
}

}  // namespace jaxfp8::cuda
