#include "cuda/kernels/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/kernels/sm90/block.h"
#include "cuda/path.h"

namespace jaxfp8::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Finds the driver's function. The library is not linked against the driver.
Status FindDriverFunction(EncodeTiled& encode) {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  JAXFP8_RETURN_IF_ERROR(
      CudaError(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion,
                                                 cudaEnableDefault, &result),
                "cudaGetDriverEntryPointByVersion"));
  encode = reinterpret_cast<EncodeTiled>(function);
  return result == cudaDriverEntryPointSuccess ? "" : "the driver has no cuTensorMapEncodeTiled";
}

// Maps boxes of a tensor of three axes whose lines have `box_line` bytes.
Status MapBoxes(CUtensorMapDataType type, void* values, const cuuint64_t (&sizes)[3],
                const cuuint64_t (&strides)[2], const cuuint32_t (&box)[3], int box_line,
                CUtensorMap& map) {
  static EncodeTiled encode = nullptr;
  static const Status driver = FindDriverFunction(encode);
  if (!driver.ok()) return driver;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      box_line == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result =
      encode(&map, type, 3, values, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return "cuTensorMapEncodeTiled failed: CUresult " + std::to_string(static_cast<int>(result));
}

}  // namespace

Status MapOperand(const MappedOperand& operand, int box_bytes, int box_lines, CUtensorMap& map) {
  return MapBoxes(
      CU_TENSOR_MAP_DATA_TYPE_UINT8, const_cast<void*>(operand.values),
      {static_cast<cuuint64_t>(operand.depth), static_cast<cuuint64_t>(operand.lines),
       static_cast<cuuint64_t>(operand.batches)},
      {static_cast<cuuint64_t>(operand.line_pitch), static_cast<cuuint64_t>(operand.batch_pitch)},
      {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_lines), 1}, box_bytes, map);
}

Status MapOutput(void* out, int64_t rows, int64_t columns, int64_t batches, int64_t row_pitch,
                 int64_t batch_pitch, CUtensorMap& map) {
  return MapBoxes(CU_TENSOR_MAP_DATA_TYPE_UINT16, out,
                  {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                   static_cast<cuuint64_t>(batches)},
                  {static_cast<cuuint64_t>(row_pitch), static_cast<cuuint64_t>(batch_pitch)},
                  {kBoxColumns, kWgmmaRows, 1}, kStagedBytes, map);
}

}  // namespace jaxfp8::cuda::sm90
