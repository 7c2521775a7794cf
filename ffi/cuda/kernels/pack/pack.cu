// Packs a side of a product for cuBLASLt, sums its lines and copies its scales: checks of requests
// and launches. All kernels are bound by memory.
//
//   source            kernel                                   reads and writes
//   K-contiguous      PackRows (kernels.cuh)                   16-byte chunks of a line
//   MN-major, 8 bits  PackTransposed                           through shared memory
//   MN-major, wider   PackTransposedWide

#include <algorithm>
#include <limits>

#include "cuda/kernels/common/grid.h"
#include "cuda/kernels/pack/kernels.cuh"
#include "cuda/kernels/pack/line_sums.cuh"
#include "cuda/kernels/pack/pack.h"
#include "cuda/path.h"

namespace jaxfp8::cuda {
namespace {

template <DType kIn, DType kOut>
cudaError_t LaunchAs(const PackArguments& p, bool transposed, cudaStream_t stream) {
  if (!transposed) {
    const int64_t chunks = p.batches * p.count_padded * p.depth_padded * SizeOf(kOut) / kChunkBytes;
    constexpr int64_t kPerBlock = kPackThreads * kChunksPerThread;
    const unsigned blocks = GridSize((chunks + kPerBlock - 1) / kPerBlock);
    PackRows<kIn, kOut><<<blocks, kPackThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  constexpr int64_t kTile = SizeOf(kIn) == 1 ? kTransposeTile : kWideTransposeTile;
  const unsigned blocks = GridSize(p.batches * ((p.count_padded + kTile - 1) / kTile) *
                                   ((p.depth_padded + kTile - 1) / kTile));
  if constexpr (SizeOf(kIn) == 1) {
    PackTransposed<kIn, kOut><<<blocks, kPackThreads, 0, stream>>>(p);
  } else {
    PackTransposedWide<kIn, kOut><<<blocks, kPackThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

template <DType kOut>
cudaError_t DecodeTo(DType in, const PackArguments& p, bool transposed, cudaStream_t stream) {
  return Visit<DType::kE4M3, DType::kE5M2, DType::kS8, DType::kU8, kOut>(
      in, cudaErrorInvalidValue,
      [&]<DType kIn>() { return LaunchAs<kIn, kOut>(p, transposed, stream); });
}

Status WhyNot(const PackRequest& r) {
  const bool raw = SizeOf(r.out) == 1;
  const bool flips = r.out == DType::kS8 && r.side.dtype == DType::kU8;
  if (raw && r.out != r.side.dtype && !flips) {
    return "pack: 8-bit values can only be copied, or uint8 become int8";
  }
  if (!raw && !IsEightBit(r.side.dtype) && r.out != r.side.dtype) {
    return "pack: values of 16 bits can only be copied";
  }
  const int64_t step = r.side.tiles.ConstantAlongDepth() ? 0 : r.side.tiles.tile_depth;
  if (r.exponents && (r.out != DType::kBF16 || !IsEightBit(r.side.dtype) || step % 8 != 0)) {
    return "pack: codes are multiplied by exponents of multiples of 8 of K, in bfloat16";
  }
  if (r.count_padded < r.lines.count || r.depth_padded < r.lines.depth ||
      r.depth_padded * SizeOf(r.out) % kChunkBytes != 0) {
    return "pack: the padded matrix is smaller than the lines, or a row no multiple of 16 bytes";
  }
  if (r.lines.batches * r.count_padded * r.depth_padded / kChunkBytes * SizeOf(r.out) >> 31) {
    return "pack: the matrix is larger than 32 GiB";
  }
  return {};
}

PackArguments MakePackArguments(const PackRequest& r, const void* values, void* matrix) {
  PackArguments p{};
  p.values = values, p.matrix = matrix;
  p.side_batch = r.side.batch_stride, p.side_free = r.side.free_stride,
  p.side_depth = r.side.depth_stride;
  p.batch = r.lines.batch, p.batches = r.lines.batches, p.first = r.lines.first;
  p.count = r.lines.count, p.depth = r.lines.depth;
  p.count_padded = r.count_padded, p.depth_padded = r.depth_padded;
  p.sign_flip = r.out == DType::kS8 && r.side.dtype == DType::kU8 ? kSignBits : 0;
  p.exponents = static_cast<const uint8_t*>(r.exponents);
  const Tiles& tiles = r.side.tiles;
  p.scale_batch = tiles.batch_stride, p.scale_line = tiles.free_stride,
  p.scale_depth = tiles.depth_stride;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  p.tile_lines = Divisor(static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_free, 1, kMax)));
  p.tile_depth = Divisor(static_cast<int32_t>(std::clamp<int64_t>(tiles.tile_depth, 1, kMax)));
  const int64_t size = SizeOf(r.side.dtype);
  const bool transposed = r.side.IsMnMajor();
  const int64_t line_step = transposed ? r.side.depth_stride : r.side.free_stride;
  p.alignment = AlignmentOf(static_cast<const char*>(values) + (transposed ? p.first * size : 0),
                            {line_step * size, r.side.batch_stride * size});
  return p;
}

__global__ void __launch_bounds__(kPackThreads)
    GatherScales(const ScaleRequest r, const float* scale, float* to) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  const int64_t i = index % r.free_padded, j = index / r.free_padded;
  if (j >= r.depth_count) return;
  const int64_t f = r.first + i * r.free_step, b = r.batch + blockIdx.y;
  to[blockIdx.y * r.batch_stride + i * r.free_stride + j * r.depth_stride] =
      i < r.free_count ? scale[r.tiles.At(b, f, j * r.depth_step)] : 0.0f;
}

}  // namespace

Status LaunchPack(const PackRequest& request, const void* values, void* matrix,
                  cudaStream_t stream) {
  JAXFP8_RETURN_IF_ERROR(WhyNot(request));
  if (request.lines.batches * request.count_padded * request.depth_padded == 0) return {};
  const PackArguments p = MakePackArguments(request, values, matrix);
  const bool transposed = request.side.IsMnMajor();
  const cudaError_t status =
      SizeOf(request.out) == 1
          ? LaunchAs<DType::kU8, DType::kU8>(p, transposed, stream)
          : Visit<DType::kBF16, DType::kF16>(request.out, cudaErrorInvalidValue, [&]<DType kOut>() {
              return DecodeTo<kOut>(request.side.dtype, p, transposed, stream);
            });
  return CudaError(status, "packing an operand");
}

Status LaunchLineSums(const Side& side, const LineRange& lines, bool as_signed, const void* values,
                      int32_t* sums, cudaStream_t stream) {
  if (!IsInt8(side.dtype)) return "sums of lines: the values have to be int8 or uint8";
  if (lines.count * lines.batches == 0) return {};
  LineSumsArguments p{};
  p.values = static_cast<const uint8_t*>(values), p.sums = sums;
  p.side_batch = side.batch_stride, p.side_free = side.free_stride,
  p.side_depth = side.depth_stride;
  p.batch = lines.batch, p.first = lines.first, p.count = lines.count, p.depth = lines.depth;
  p.sign_flip = side.dtype == DType::kU8 && as_signed ? kSignBits : 0;
  p.is_signed = side.dtype == DType::kS8 || as_signed;
  const unsigned batches = GridSize(lines.batches);
  if (!side.IsMnMajor()) {
    p.alignment = AlignmentOf(values, {side.free_stride, side.batch_stride});
    constexpr int64_t kPerBlock = kSumThreads / 32;
    const dim3 grid(GridSize((p.count + kPerBlock - 1) / kPerBlock), batches);
    SumLinesKContiguous<<<grid, kSumThreads, 0, stream>>>(p);
    return CudaError(cudaGetLastError(), "summing the lines of an operand");
  }
  p.alignment = AlignmentOf(p.values + p.first, {side.depth_stride, side.batch_stride});
  // Biased by 128, int8 values are 0 to 255, as uint8 ones are.
  p.sign_flip = side.dtype == DType::kS8 ? kSignBits : 0;
  const cudaError_t cleared = cudaMemsetAsync(
      sums, 0, static_cast<size_t>(p.count * lines.batches) * sizeof(int32_t), stream);
  if (cleared != cudaSuccess) return CudaError(cleared, "clearing the sums of lines");
  const dim3 grid(GridSize((p.count + kSumLines - 1) / kSumLines), batches,
                  GridSize(std::max<int64_t>(1, (p.depth + kSumDepth - 1) / kSumDepth)));
  SumLinesMnMajor<<<grid, kSumThreads, 0, stream>>>(p);
  return CudaError(cudaGetLastError(), "summing the lines of an operand");
}

Status LaunchScales(const ScaleRequest& request, const float* scale, float* to,
                    cudaStream_t stream) {
  ScaleRequest r = request;
  r.free_padded = std::max(r.free_padded, r.free_count);
  const int64_t values = r.free_padded * r.depth_count;
  if (values * r.batches == 0) return {};
  const dim3 grid(GridSize((values + kPackThreads - 1) / kPackThreads), GridSize(r.batches));
  GatherScales<<<grid, kPackThreads, 0, stream>>>(r, scale, to);
  return CudaError(cudaGetLastError(), "laying out scales");
}

}  // namespace jaxfp8::cuda
