#include "cuda/kernels/sm90_gemm/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/path.h"

namespace jaxfp8::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function. The library is not linked against the driver.
EncodeTiled DriverFunction(std::string& wrong) {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  wrong = CudaError(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion,
                                                     cudaEnableDefault, &result),
                    "cudaGetDriverEntryPointByVersion");
  if (wrong.empty() && result != cudaDriverEntryPointSuccess) {
    wrong = "the driver has no cuTensorMapEncodeTiled";
  }
  return reinterpret_cast<EncodeTiled>(function);
}

}  // namespace

std::string MapOperand(const MappedOperand& operand, int box_bytes, int box_lines,
                       CUtensorMap& map) {
  static std::string wrong;
  static const EncodeTiled encode = DriverFunction(wrong);
  if (!wrong.empty()) return wrong;
  constexpr cuuint32_t kAxes = 3;
  const cuuint64_t sizes[kAxes] = {static_cast<cuuint64_t>(operand.depth),
                                   static_cast<cuuint64_t>(operand.lines),
                                   static_cast<cuuint64_t>(operand.batches)};
  const cuuint64_t strides[kAxes - 1] = {static_cast<cuuint64_t>(operand.line_pitch),
                                         static_cast<cuuint64_t>(operand.batch_pitch)};
  const cuuint32_t box[kAxes] = {static_cast<cuuint32_t>(box_bytes),
                                 static_cast<cuuint32_t>(box_lines), 1};
  const cuuint32_t steps[kAxes] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kAxes, const_cast<void*>(operand.values), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return "";
  return "cuTensorMapEncodeTiled failed: CUresult " + std::to_string(static_cast<int>(result));
}

}  // namespace jaxfp8::cuda::sm90
