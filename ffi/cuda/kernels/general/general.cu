// Path "general", the fallback: every canonical problem, any pair of dtypes, no tensor cores.
//
//   global      lhs, 64 rows x 32 K            rhs, 64 columns x 32 K
//                  |  StageOperand: decode, - zero point, * scales varying along K
//                  v                              v
//   shared      [32 K][64 + 4]                 [32 K][64 + 4]      float32 or int32
//                  |                              |
//   registers   4 rows x 8 columns a thread: acc += lhs * rhs      128 threads, 64 x 64 outputs
//                  |  * scales constant along K, elementwise epilogue
//   global      out
//
// Accumulators are float32, or integers if both sides are integers and no scale varies along K.

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/scale_form.cuh"
#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/general/general.h"

namespace jaxfp8::cuda {

// One side of the general kernel: decodes 64 lines x 32 K into shared memory.
//
//   global, any dtype and layout     a thread loads 16 consecutive values of a line (K-contiguous)
//                                    or of a depth (MN-major)
//   registers                        decoded, - zero_point, * scale if it varies along K
//   shared [32 K][64 lines + 4]      padded rows, zeros past the end

inline constexpr int kGeneralThreads = 128;
inline constexpr int kTile = kGeneralTile;
inline constexpr int kStep = 32;          // K per pass
inline constexpr int kRun = 16;           // consecutive values loaded by a thread
inline constexpr int kPitch = kTile + 4;  // rows stay 16-byte aligned and start 4 banks apart

// A side with its arrays.
struct StridedOperand {
  Side side;
  const void* values;
  const void* scale;
  ScaleForm form;
  const int32_t* zero_point;
  int64_t lines;
  int64_t inner_batch;  // of the problem
  int alignment;        // in bytes, of runs starting at a multiple of kRun

  // The index along the outer batch axis, for jumps.
  __device__ __forceinline__ int64_t Outer(int64_t b) const { return TileOf(b, inner_batch); }
  // The index of a value's scale and zero point.
  __device__ __forceinline__ int64_t TileAt(int64_t b, int64_t f, int64_t k) const {
    return cuda::TileAt(side.tiles, b, f, k) + Outer(b) * side.tiles.batch_jump;
  }
  __device__ __forceinline__ float Scale(int64_t at) const {
    return ScaleOf(form, LoadScale(scale, form, at));
  }
};

// A run in registers.
template <typename Value>
struct Run {
  Value v[kRun];
};

template <DType kType, typename Value>
__device__ __forceinline__ void LoadAs(const StridedOperand& o, int64_t at, int64_t count,
                                       Run<Value>& run) {
  uint32_t words[kRun * SizeOf(kType) / 4];
  LoadRun(static_cast<const Bits<kType>*>(o.values) + at, count, o.alignment, words);
  if constexpr (IsInt8(kType)) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t byte = words[i / 4] >> (8 * (i % 4)) & 0xffu;
      run.v[i] = static_cast<Value>(kType == DType::kS8 ? static_cast<int8_t>(byte)
                                                        : static_cast<int32_t>(byte));
    }
  } else if constexpr (std::is_same_v<Value, float>) {
#pragma unroll
    for (int i = 0; i < kRun / kPerWord<kType>; ++i) {
      DecodeWord<kType>(words[i], run.v + i * kPerWord<kType>);
    }
  }
}

template <typename Value>
__device__ __forceinline__ void LoadValues(const StridedOperand& o, int64_t at, int64_t count,
                                           Run<Value>& run) {
  WithType(o.side.dtype, [&]<DType kType>() { LoadAs<kType>(o, at, count, run); });
}

template <typename Value>
__device__ __forceinline__ void Dequantize(const StridedOperand& o, int64_t b, int64_t f, int64_t k,
                                           int64_t count, Run<Value>& run) {
  const Tiles& t = o.side.tiles;
  const bool scaled = std::is_same_v<Value, float> && o.scale && !t.ConstantAlongDepth();
  if (!scaled && !o.zero_point) return;
  const bool mn_major = o.side.IsMnMajor();
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i >= count) break;
    const int64_t at = o.TileAt(b, mn_major ? f + i : f, mn_major ? k : k + i);
    if (o.zero_point) run.v[i] -= static_cast<Value>(o.zero_point[at]);
    if (scaled) run.v[i] *= static_cast<Value>(o.Scale(at));
  }
}

// Copies lines [first, first + kTile) at depths [start, start + kStep) to shared memory, and zeros
// past their ends.
template <typename Value>
__device__ __forceinline__ void StageOperand(const StridedOperand& o, int64_t depth, int64_t b,
                                             int64_t first, int64_t start,
                                             Value (&to)[kStep][kPitch]) {
  const bool mn_major = o.side.IsMnMajor();
  const int line = mn_major ? threadIdx.x % 4 * kRun : threadIdx.x / 2;
  const int step = mn_major ? threadIdx.x / 4 : threadIdx.x % 2 * kRun;
  const int64_t f = first + line, k = start + step;
  int64_t count = f < o.lines && k < depth ? (mn_major ? o.lines - f : depth - k) : 0;
  count = min(count, int64_t{kRun});
  Run<Value> run{};
  if (count > 0) {
    const Side& s = o.side;
    const int64_t of_batch = b * s.batch_stride + o.Outer(b) * s.batch_jump;
    LoadValues(o, of_batch + f * s.free_stride + k * s.depth_stride, count, run);
    Dequantize(o, b, f, k, count, run);
  }
  if (mn_major) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step][line + i] = run.v[i];
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step + i][line] = run.v[i];
  }
}

// The scale to apply after the sum. 1 if it was applied before or there is none.
__device__ __forceinline__ float ScaleAfter(const StridedOperand& o, int64_t b, int64_t f) {
  const Tiles& t = o.side.tiles;
  return o.scale && t.ConstantAlongDepth() ? o.Scale(o.TileAt(b, f, 0)) : 1.0f;
}

namespace {

// The longest K with an exact int32 sum of products of two 8-bit values.
constexpr int64_t kExactDepth = 32768;

struct GeneralArguments {
  StridedOperand lhs, rhs;
  int64_t depth, tiles_across, tiles_down;
  Elementwise elementwise;
};

// The type of decoded values by the type of accumulators: float; int32_t for codes; int64_t for
// codes minus zero points, or for a long K.
template <typename Sum>
struct Arithmetic {
  using Value = int32_t;
};
template <>
struct Arithmetic<float> {
  using Value = float;
};

__device__ __forceinline__ float MultiplyAdd(float a, float b, float sum) {
  return fmaf(a, b, sum);
}
__device__ __forceinline__ int32_t MultiplyAdd(int32_t a, int32_t b, int32_t sum) {
  return a * b + sum;
}
__device__ __forceinline__ int64_t MultiplyAdd(int32_t a, int32_t b, int64_t sum) {
  return int64_t{a} * b + sum;
}

// acc += one pass of K. A thread computes four rows from 4 * (thread / 8) on, and four columns from
// 4 * (thread % 8) on and from 32 + 4 * (thread % 8) on.
template <typename Sum, typename Value>
__device__ __forceinline__ void Multiply(const Value (&lhs)[kStep][kPitch],
                                         const Value (&rhs)[kStep][kPitch], Sum (&sums)[4][8]) {
  const int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 4;
#pragma unroll 8
  for (int k = 0; k < kStep; ++k) {
    Value a[4], c[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = lhs[k][row + i], c[i] = rhs[k][column + i], c[4 + i] = rhs[k][32 + column + i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = MultiplyAdd(a[i], c[j], sums[i][j]);
    }
  }
}

// Not inlined: a thread stores eight quads, and eight copies double the compile time.
template <typename Sum>
__device__ __noinline__ uint32_t StoreSums(const GeneralArguments& g, Quad q, float row_scale,
                                           float4 column_scales, Sum s0, Sum s1, Sum s2, Sum s3) {
  const float column_scale[4] = {column_scales.x, column_scales.y, column_scales.z,
                                 column_scales.w};
  const Sum sums[4] = {s0, s1, s2, s3};
  const Elementwise& ew = g.elementwise;
  float y[4], bias[4] = {}, out_scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = static_cast<float>(sums[i]) * row_scale * column_scale[i];
  }
  if constexpr (!std::is_same_v<Sum, float>) {
    if (ew.out_plane.dtype == DType::kS32) {
      const uint32_t low[4] = {static_cast<uint32_t>(sums[0]), static_cast<uint32_t>(sums[1]),
                               static_cast<uint32_t>(sums[2]), static_cast<uint32_t>(sums[3])};
      StoreIntegers(ew, q, low);
      return AmaxOf(ew, q, y);
    }
  }
  if (ew.bias_plane) LoadPlane(ew.bias_plane, ew.bias, q, 0.0f, bias);
  if (ew.out_scale_plane) LoadPlane(ew.out_scale_plane, ew.out_scale, q, 1.0f, out_scale);
  return ApplyElementwise(ew, q, bias, out_scale, y);
}

template <typename Sum>
__device__ __forceinline__ void StoreTile(const GeneralArguments& g, int64_t b, int64_t first_row,
                                          int64_t first_column, const Sum (&sums)[4][8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t c = first_column + half * 32 + threadIdx.x % 8 * 4;
    const int count = static_cast<int>(max(min(g.rhs.lines - c, int64_t{4}), int64_t{0}));
    const auto scale = [&](int i) { return i < count ? ScaleAfter(g.rhs, b, c + i) : 1.0f; };
    const float4 column_scales = make_float4(scale(0), scale(1), scale(2), scale(3));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Quad q{b, first_row + threadIdx.x / 8 * 4 + i, c, count};
      if (q.r >= g.lhs.lines || count == 0) continue;
      const Sum* s = &sums[i][4 * half];
      const uint32_t seen =
          StoreSums(g, q, ScaleAfter(g.lhs, b, q.r), column_scales, s[0], s[1], s[2], s[3]);
      largest = max(largest, seen);
      if (g.elementwise.amax_kind == AmaxKind::kPerRow) {
        atomicMax(g.elementwise.amax + g.elementwise.amax_plane.At(b, q.r, 0), seen);
      }
    }
  }
  UpdateMatrixAmax(g.elementwise, b, largest);
}

template <typename Sum>
__global__ void __launch_bounds__(kGeneralThreads)
    RunGeneral(const __grid_constant__ GeneralArguments g) {
  using Value = typename Arithmetic<Sum>::Value;
  __shared__ __align__(16) Value lhs[kStep][kPitch];
  __shared__ __align__(16) Value rhs[kStep][kPitch];
  const int64_t tile = blockIdx.x;
  const int64_t b = tile / (g.tiles_across * g.tiles_down);
  const int64_t first_row = tile / g.tiles_across % g.tiles_down * kTile;
  const int64_t first_column = tile % g.tiles_across * kTile;
  Sum sums[4][8] = {};
  for (int64_t k = 0; k < g.depth; k += kStep) {
    StageOperand(g.lhs, g.depth, b, first_row, k, lhs);
    StageOperand(g.rhs, g.depth, b, first_column, k, rhs);
    __syncthreads();
    Multiply(lhs, rhs, sums);
    __syncthreads();
  }
  StoreTile(g, b, first_row, first_column, sums);
}

StridedOperand MakeOperand(const Problem& problem, const Side& side, int64_t lines,
                           const void* values, const float* scale, const int32_t* zero_point) {
  StridedOperand o{};
  o.side = side, o.lines = lines, o.values = values, o.inner_batch = problem.inner_batch;
  o.scale = side.scale ? scale : nullptr, o.form = ScaleFormOf(side);
  o.zero_point = side.zero_point ? zero_point : nullptr;
  const int64_t size = SizeOf(side.dtype);
  const int64_t step = side.IsMnMajor() ? side.depth_stride : side.free_stride;
  o.alignment =
      AlignmentOf(values, {step * size, side.batch_stride * size, side.batch_jump * size});
  return o;
}

template <typename Sum>
cudaError_t Launch(const GeneralArguments& g, int64_t batch, cudaStream_t stream) {
  const int64_t blocks = batch * g.tiles_across * g.tiles_down;
  if (blocks >> 31) return cudaErrorInvalidConfiguration;
  RunGeneral<Sum><<<static_cast<unsigned>(blocks), kGeneralThreads, 0, stream>>>(g);
  return cudaGetLastError();
}

bool VariesAlongDepth(const Side& side) { return side.scale && !side.tiles.ConstantAlongDepth(); }

cudaError_t LaunchKind(const Problem& problem, const GeneralArguments& g, cudaStream_t stream) {
  const Side &lhs = problem.lhs, &rhs = problem.rhs;
  const bool integers = IsInt8(lhs.dtype) && IsInt8(rhs.dtype);
  if (!integers || VariesAlongDepth(lhs) || VariesAlongDepth(rhs)) {
    return Launch<float>(g, problem.batch, stream);
  }
  const bool wide = lhs.zero_point || rhs.zero_point || problem.depth > kExactDepth;
  return wide ? Launch<int64_t>(g, problem.batch, stream)
              : Launch<int32_t>(g, problem.batch, stream);
}

class GeneralPlan : public Plan {
 public:
  explicit GeneralPlan(const Problem& problem) : problem_(problem) {}
  Status Run(const Buffers& buffers, cudaStream_t stream) const override {
    return LaunchGeneral(problem_, buffers, stream);
  }

 private:
  Problem problem_;
};

}  // namespace

Status PlanGeneral(const Problem& problem, const Device&, size_t, std::unique_ptr<Plan>& plan) {
  plan = std::make_unique<GeneralPlan>(problem);
  return {};
}

Status LaunchGeneral(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  JAXFP8_RETURN_IF_ERROR(ClearAmax(problem, buffers, stream));
  if (problem.batch * problem.rows * problem.columns == 0) return {};
  GeneralArguments g{};
  g.lhs = MakeOperand(problem, problem.lhs, problem.rows, buffers.lhs, buffers.lhs_scale,
                      buffers.lhs_zero_point);
  g.rhs = MakeOperand(problem, problem.rhs, problem.columns, buffers.rhs, buffers.rhs_scale,
                      buffers.rhs_zero_point);
  g.depth = problem.depth;
  g.tiles_across = (problem.columns + kTile - 1) / kTile;
  g.tiles_down = (problem.rows + kTile - 1) / kTile;
  g.elementwise = MakeElementwise(problem, buffers);
  return CudaError(LaunchKind(problem, g, stream), "the general kernel");
}

}  // namespace jaxfp8::cuda
