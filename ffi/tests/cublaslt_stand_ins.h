// Stand-ins for cuBLASLt and the kernels around it: loops on the host that do what the headers say,
// so that plans run without a GPU. Defines these functions, so only one file of a program may
// include it.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/decode.h"
#include "common/encode.h"
#include "cuda/cublaslt/matmul.h"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/pack/pack.h"
#include "tests/expect.h"

namespace jaxfp8::cuda {
namespace {

int modes_seen[8];  // by mode of the right side's scale
int accumulated = 0, added = 0, batched = 0, transposed = 0, encoded = 0;
bool refuse_unpadded = false;  // be a library that has no algorithm for odd sizes

using tests::Expect;

double Load(const void* from, int64_t i, DType type) {
  const auto* byte = static_cast<const uint8_t*>(from) + i * SizeOf(type);
  uint16_t half;
  std::memcpy(&half, byte, SizeOf(type) == 2 ? 2 : 1);
  float word;
  std::memcpy(&word, byte, SizeOf(type) == 4 ? 4 : 1);
  switch (type) {
    case DType::kE4M3:
      return DecodeE4M3(*byte);
    case DType::kE5M2:
      return DecodeE5M2(*byte);
    case DType::kS8:
      return static_cast<int8_t>(*byte);
    case DType::kU8:
      return *byte;
    case DType::kBF16:
      return DecodeBF16(half);
    case DType::kF16:
      return DecodeF16(half);
    case DType::kS32:
      return std::bit_cast<int32_t>(word);
    default:
      return word;
  }
}

template <typename T>
void Put(void* to, int64_t i, T value) {
  std::memcpy(static_cast<uint8_t*>(to) + i * sizeof(T), &value, sizeof(T));
}

void Store(void* to, int64_t i, DType type, double value) {
  const auto rounded = static_cast<float>(value);
  switch (type) {
    case DType::kBF16:
      return Put(to, i, EncodeBF16(rounded));
    case DType::kF16:
      return Put(to, i, EncodeF16(rounded));
    case DType::kS32:
      return Put(to, i, EncodeS32(value));
    case DType::kF32:
      return Put(to, i, rounded);
    case DType::kE4M3:
      return Put(to, i, EncodeE4M3(rounded));
    case DType::kE5M2:
      return Put(to, i, EncodeE5M2(rounded));
    case DType::kS8:
      return Put(to, i, EncodeS8(RoundToOdd(value)));
    default:
      return Put(to, i, EncodeU8(RoundToOdd(value)));
  }
}

DType TypeOf(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return DType::kE4M3;
    case CUDA_R_8F_E5M2:
      return DType::kE5M2;
    case CUDA_R_8I:
      return DType::kS8;
    case CUDA_R_16BF:
      return DType::kBF16;
    case CUDA_R_16F:
      return DType::kF16;
    case CUDA_R_32I:
      return DType::kS32;
    default:
      return DType::kF32;
  }
}

// The scale of line i at depth k, in the order that the library's documentation defines.
double LibraryScale(const float* scale, cublasLtMatmulMatrixScale_t mode, int64_t lines, int64_t i,
                    int64_t k, int64_t depth) {
  if (!scale) return 1;
  const int64_t blocks = (depth + 127) / 128;
  switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
      return scale[i];
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
      return scale[k / 128 * lines + i];
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
      return scale[i / 128 * ((blocks + 3) / 4 * 4) + k / 128];
    default:
      return scale[0];
  }
}

void RunEpilogue(const Problem& p, int64_t b, int64_t r, int64_t c, double y,
                 const Buffers& buffers) {
  if (p.residual) y += Load(buffers.residual, p.residual.At(b, r, c), p.residual.dtype);
  if (p.bias) y += buffers.bias[p.bias.At(b, r, c)];
  y = Apply(p.activation, y);
  if (p.amax) {
    float& amax = buffers.amax[p.amax.At(b, r, c)];
    amax = std::max(amax, static_cast<float>(std::abs(y)));
  }
  if (p.out_scale) y /= buffers.out_scale[p.out_scale.At(b, r, c)];
  Store(buffers.out, p.out.At(b, r, c), p.out.dtype, y);
}

double Corrected(const Problem& p, const EpilogueRequest& q, const void* sums,
                 const Buffers& buffers, int64_t b, int64_t r, int64_t c) {
  const Slab& s = q.slab;
  const int64_t i = b - s.batch, j = r - s.row, l = c - s.column;
  double total = Load(sums, i * s.batch_stride + j * s.row_stride + l, s.dtype);
  const auto zero = [&](const Correction& side, const Tiles& tiles, const int32_t* from,
                        int64_t f) -> double {
    return (side.zero_point ? from[tiles.At(b, f, side.depth)] : 0) + side.shift;
  };
  const double left = zero(q.lhs, p.lhs.tiles, buffers.lhs_zero_point, r);
  const double right = zero(q.rhs, p.rhs.tiles, buffers.rhs_zero_point, c);
  if (left != 0) total -= left * q.rhs.line_sums[i * q.rhs.line_sums_batch + l];
  if (right != 0) total -= right * q.lhs.line_sums[i * q.lhs.line_sums_batch + j];
  total += static_cast<double>(p.depth) * left * right;
  if (q.lhs.scale) total *= buffers.lhs_scale[p.lhs.tiles.At(b, r, q.lhs.depth)];
  if (q.rhs.scale) total *= buffers.rhs_scale[p.rhs.tiles.At(b, c, q.rhs.depth)];
  return total;
}

template <typename Visit>
void ForEachOutput(const Slab& s, const Visit& visit) {
  for (int64_t b = s.batch; b < s.batch + s.batches; ++b) {
    for (int64_t r = s.row; r < s.row + s.rows; ++r) {
      for (int64_t c = s.column; c < s.column + s.columns; ++c) visit(b, r, c);
    }
  }
}

}  // namespace

// The kernels, by their headers.

Status LaunchPack(const PackRequest& q, const void* values, void* matrix, cudaStream_t) {
  const bool wide = SizeOf(q.out) == 2;
  for (int64_t b = 0; b < q.lines.batches; ++b) {
    for (int64_t f = 0; f < q.count_padded; ++f) {
      for (int64_t k = 0; k < q.depth_padded; ++k) {
        const int64_t to = (b * q.count_padded + f) * q.depth_padded + k;
        if (f >= q.lines.count || k >= q.lines.depth) {
          std::memset(static_cast<char*>(matrix) + to * SizeOf(q.out), 0, SizeOf(q.out));
          continue;
        }
        const int64_t from = (q.lines.batch + b) * q.side.batch_stride +
                             (q.lines.first + f) * q.side.free_stride + k * q.side.depth_stride;
        double value = Load(values, from, q.side.dtype);
        if (q.exponents) {
          const int64_t at = q.side.tiles.At(q.lines.batch + b, q.lines.first + f, k);
          value *= DecodeE8M0(static_cast<const uint8_t*>(q.exponents)[at]);
        }
        const bool shift = !wide && q.side.dtype != q.out;
        Store(matrix, to, q.out, value - (shift ? 128 : 0));
      }
    }
  }
  return {};
}

Status LaunchLineSums(const Side& side, const LineRange& lines, bool as_signed, const void* values,
                      int32_t* sums, cudaStream_t) {
  for (int64_t b = 0; b < lines.batches; ++b) {
    for (int64_t f = 0; f < lines.count; ++f) {
      double sum = 0;
      for (int64_t k = 0; k < lines.depth; ++k) {
        const int64_t at = (lines.batch + b) * side.batch_stride +
                           (lines.first + f) * side.free_stride + k * side.depth_stride;
        sum += Load(values, at, side.dtype) - (as_signed && side.dtype == DType::kU8 ? 128 : 0);
      }
      sums[b * lines.count + f] = static_cast<int32_t>(sum);
    }
  }
  return {};
}

Status LaunchScales(const ScaleRequest& q, const float* scale, float* to, cudaStream_t) {
  for (int64_t i = 0; i < std::max(q.free_padded, q.free_count); ++i) {
    for (int64_t j = 0; j < q.depth_count; ++j) {
      to[i * q.free_stride + j * q.depth_stride] =
          i < q.free_count ? scale[q.tiles.At(q.batch, q.first + i * q.free_step, j * q.depth_step)]
                           : 0;
    }
  }
  return {};
}

Status LaunchEpilogue(const Problem& p, const EpilogueRequest& q, const void* sums,
                      const Buffers& buffers, cudaStream_t) {
  accumulated += p.residual && buffers.residual == buffers.out;
  ForEachOutput(q.slab, [&](int64_t b, int64_t r, int64_t c) {
    RunEpilogue(p, b, r, c, Corrected(p, q, sums, buffers, b, r, c), buffers);
  });
  return {};
}

Status ClearAmax(const Problem& p, const Buffers& buffers, cudaStream_t) {
  const Slab all{DType::kNone, 0, p.batch, 0, p.rows, 0, p.columns, 0, 0};
  if (!p.amax) return {};
  ForEachOutput(all,
                [&](int64_t b, int64_t r, int64_t c) { buffers.amax[p.amax.At(b, r, c)] = 0; });
  return {};
}

Status LaunchReciprocal(const float* from, float* to, cudaStream_t) {
  *to = 1 / *from;
  return {};
}

// The library.

Status Matmul::Make(const Device&, const MatmulShape& s, size_t,
                    std::unique_ptr<const Matmul>& matmul) {
  const bool wide = s.a == CUDA_R_16BF || s.a == CUDA_R_16F;
  const auto aligned = [&](int64_t elements, cudaDataType_t type) {
    return elements * SizeOf(TypeOf(type)) % kMatmulAlignment == 0;
  };
  Expect(aligned(s.lda, s.a) && aligned(s.ldb, s.b) && aligned(s.ldd, s.d), "pitches are aligned");
  Expect(wide || (aligned(s.k, s.a) && !s.plain_a && !s.transposed_b),
         "8 bits lie along the depth");
  const bool odd = s.m % 16 != 0 || s.n % 16 != 0;
  if (refuse_unpadded && odd) return "odd sizes";
  std::unique_ptr<Matmul> made(new Matmul);
  made->shape_ = s;
  matmul = std::move(made);
  return {};
}

Status Matmul::Run(const MatmulBuffers& buffers, cudaStream_t) const {
  const MatmulShape& s = shape_;
  for (const void* pointer : {buffers.a, buffers.b, static_cast<const void*>(buffers.d)}) {
    Expect(reinterpret_cast<uintptr_t>(pointer) % kMatmulAlignment == 0, "pointers are aligned");
  }
  if (s.scale_a) ++modes_seen[s.mode_a];
  added += s.add_c;
  batched += s.batch > 1;
  transposed += s.plain_a || s.transposed_b;
  encoded += s.scale_d;
  const DType a = TypeOf(s.a), b = TypeOf(s.b), d = TypeOf(s.d);
  std::vector<double> left(s.n * s.k), right(s.m * s.k);
  for (int64_t t = 0; t < s.batch; ++t) {
    for (int64_t k = 0; k < s.k; ++k) {
      for (int64_t j = 0; j < s.n; ++j) {
        const int64_t at = t * s.batch_b + (s.transposed_b ? k * s.ldb + j : j * s.ldb + k);
        left[j * s.k + k] =
            Load(buffers.b, at, b) *
            (s.scale_b ? LibraryScale(buffers.scale_b, s.mode_b, s.n, j, k, s.k) : 1);
      }
      for (int64_t i = 0; i < s.m; ++i) {
        const int64_t at = t * s.batch_a + (s.plain_a ? k * s.lda + i : i * s.lda + k);
        right[i * s.k + k] =
            Load(buffers.a, at, a) *
            (s.scale_a ? LibraryScale(buffers.scale_a, s.mode_a, s.m, i, k, s.k) : 1);
      }
    }
    for (int64_t j = 0; j < s.n; ++j) {
      for (int64_t i = 0; i < s.m; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < s.k; ++k) sum += left[j * s.k + k] * right[i * s.k + k];
        const int64_t to = t * s.batch_d + j * s.ldd + i;
        if (s.add_c) sum += Load(buffers.c, to, d);
        if (s.relu) sum = Relu(sum);
        if (s.amax_d)
          *buffers.amax_d = std::max(*buffers.amax_d, std::abs(static_cast<float>(sum)));
        if (s.scale_d) sum *= *buffers.scale_d;
        Store(buffers.d, to, d, sum);
      }
    }
  }
  return {};
}

}  // namespace jaxfp8::cuda
