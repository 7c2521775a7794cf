// Path "general": every canonical problem, from any pair of dtypes, without tensor cores.
//
// A block of 128 threads makes 64 x 64 outputs. Step by step along the depth it decodes 64 x 32
// values of each side into shared memory, less their zero points and times the scales that vary
// along the depth, and multiplies: float32 FMA, or integers where both sides are and no scale
// varies along the depth. Scales that are constant along the depth follow the sum.

#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/common/tile_index.cuh"
#include "cuda/kernels/common/vector.cuh"
#include "cuda/kernels/epilogue/elementwise.cuh"
#include "cuda/kernels/epilogue/epilogue.h"
#include "cuda/kernels/general/general.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = kGeneralTile;
constexpr int kStep = 32;          // depth in shared memory
constexpr int kRun = 16;           // consecutive values of a side that a thread loads
constexpr int kPitch = kTile + 4;  // keeps rows 16-byte aligned and moves them 4 banks apart

// Products of two 8-bit values reach 255^2; so many of them fit int32.
constexpr int64_t kExactDepth = 32768;

struct Operand {
  Side side;
  const void* values;
  const float* scale;
  const int32_t* zero_point;
  int64_t lines;
  int alignment;  // of runs that start at a multiple of 16
};

struct General {
  Operand lhs, rhs;
  int64_t depth, tiles_across, tiles_down;
  Elementwise elementwise;
};

// float: sums of float32. int32_t: of the codes. int64_t: of the codes less their zero points.
template <typename Sum>
struct Arithmetic {
  using Value = int32_t;
};
template <>
struct Arithmetic<float> {
  using Value = float;
};

// A run of 16 in registers.
template <typename Value>
struct Run {
  Value v[kRun];
};

template <DType kType, typename Value>
__device__ __forceinline__ void LoadAs(const Operand& o, int64_t at, int64_t count,
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
__device__ __forceinline__ void LoadValues(const Operand& o, int64_t at, int64_t count,
                                           Run<Value>& run) {
  switch (o.side.dtype) {
    case DType::kS8:
      return LoadAs<DType::kS8>(o, at, count, run);
    case DType::kU8:
      return LoadAs<DType::kU8>(o, at, count, run);
    case DType::kE4M3:
      return LoadAs<DType::kE4M3>(o, at, count, run);
    case DType::kE5M2:
      return LoadAs<DType::kE5M2>(o, at, count, run);
    case DType::kBF16:
      return LoadAs<DType::kBF16>(o, at, count, run);
    case DType::kF16:
      return LoadAs<DType::kF16>(o, at, count, run);
    default:
      return LoadAs<DType::kF32>(o, at, count, run);
  }
}

template <typename Value>
__device__ __forceinline__ void Dequantize(const Operand& o, int64_t b, int64_t f, int64_t k,
                                           int64_t count, Run<Value>& run) {
  const Tiles& t = o.side.tiles;
  const bool scaled = std::is_same_v<Value, float> && o.scale && !t.ConstantAlongDepth();
  if (!scaled && !o.zero_point) return;
  const bool along_free = o.side.IsMnMajor();
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i >= count) break;
    const int64_t at = TileAt(t, b, along_free ? f + i : f, along_free ? k : k + i);
    if (o.zero_point) run.v[i] -= static_cast<Value>(o.zero_point[at]);
    if (scaled) run.v[i] *= static_cast<Value>(o.scale[at]);
  }
}

// Brings lines [first, first + 64) at depths [start, start + 32) to shared memory, zeros where
// there are none.
template <typename Value>
__device__ __forceinline__ void Stage(const Operand& o, int64_t depth, int64_t b, int64_t first,
                                      int64_t start, Value (&to)[kStep][kPitch]) {
  const bool along_free = o.side.IsMnMajor();
  const int line = along_free ? threadIdx.x % 4 * kRun : threadIdx.x / 2;
  const int step = along_free ? threadIdx.x / 4 : threadIdx.x % 2 * kRun;
  const int64_t f = first + line, k = start + step;
  int64_t count = f < o.lines && k < depth ? (along_free ? o.lines - f : depth - k) : 0;
  count = min(count, int64_t{kRun});
  Run<Value> run{};
  if (count > 0) {
    const Side& s = o.side;
    LoadValues(o, b * s.batch + f * s.free + k * s.depth, count, run);
    Dequantize(o, b, f, k, count, run);
  }
  if (along_free) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step][line + i] = run.v[i];
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) to[step + i][line] = run.v[i];
  }
}

__device__ __forceinline__ float MultiplyAdd(float a, float b, float sum) {
  return fmaf(a, b, sum);
}
__device__ __forceinline__ int32_t MultiplyAdd(int32_t a, int32_t b, int32_t sum) {
  return a * b + sum;
}
__device__ __forceinline__ int64_t MultiplyAdd(int32_t a, int32_t b, int64_t sum) {
  return int64_t{a} * b + sum;
}

// Rows 4 * (thread / 8) and on, columns 4 * (thread % 8) and on, and those 32 further.
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

// The scale that follows the sum; 1 where it was applied before, or where there is none.
__device__ __forceinline__ float ScaleAfter(const Operand& o, int64_t b, int64_t f) {
  const Tiles& t = o.side.tiles;
  return o.scale && t.ConstantAlongDepth() ? o.scale[TileAt(t, b, f, 0)] : 1.0f;
}

template <typename Sum>
__device__ __forceinline__ uint32_t FinishSums(const General& g, const Quad& q, float row_scale,
                                               const float (&column_scale)[4], const Sum* sums) {
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
__device__ __forceinline__ void FinishTile(const General& g, int64_t b, int64_t first_row,
                                           int64_t first_column, const Sum (&sums)[4][8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t c = first_column + half * 32 + threadIdx.x % 8 * 4;
    const int count = static_cast<int>(max(min(g.rhs.lines - c, int64_t{4}), int64_t{0}));
    float column_scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      column_scale[i] = i < count ? ScaleAfter(g.rhs, b, c + i) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Quad q{b, first_row + threadIdx.x / 8 * 4 + i, c, count};
      if (q.r >= g.lhs.lines || count == 0) continue;
      const uint32_t seen =
          FinishSums(g, q, ScaleAfter(g.lhs, b, q.r), column_scale, &sums[i][4 * half]);
      largest = max(largest, seen);
      if (g.elementwise.amax_kind == AmaxKind::kPerRow) {
        atomicMax(g.elementwise.amax + g.elementwise.amax_plane.At(b, q.r, 0), seen);
      }
    }
  }
  UpdateMatrixAmax(g.elementwise, b, largest);
}

template <typename Sum>
__global__ void __launch_bounds__(kThreads) RunGeneral(const General g) {
  using Value = typename Arithmetic<Sum>::Value;
  __shared__ __align__(16) Value lhs[kStep][kPitch];
  __shared__ __align__(16) Value rhs[kStep][kPitch];
  const int64_t tile = blockIdx.x;
  const int64_t b = tile / (g.tiles_across * g.tiles_down);
  const int64_t first_row = tile / g.tiles_across % g.tiles_down * kTile;
  const int64_t first_column = tile % g.tiles_across * kTile;
  Sum sums[4][8] = {};
  for (int64_t k = 0; k < g.depth; k += kStep) {
    Stage(g.lhs, g.depth, b, first_row, k, lhs);
    Stage(g.rhs, g.depth, b, first_column, k, rhs);
    __syncthreads();
    Multiply(lhs, rhs, sums);
    __syncthreads();
  }
  FinishTile(g, b, first_row, first_column, sums);
}

Operand MakeOperand(const Side& side, int64_t lines, const void* values, const float* scale,
                    const int32_t* zero_point) {
  Operand o{};
  o.side = side, o.lines = lines, o.values = values;
  o.scale = side.scale ? scale : nullptr;
  o.zero_point = side.zero_point ? zero_point : nullptr;
  const int64_t size = SizeOf(side.dtype);
  const int64_t step = side.IsMnMajor() ? side.depth : side.free;
  o.alignment = AlignmentOf(values, {step * size, side.batch * size});
  return o;
}

template <typename Sum>
cudaError_t Launch(const General& g, int64_t batch, cudaStream_t stream) {
  const int64_t blocks = batch * g.tiles_across * g.tiles_down;
  if (blocks >> 31) return cudaErrorInvalidConfiguration;
  RunGeneral<Sum><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(g);
  return cudaGetLastError();
}

bool VariesAlongDepth(const Side& side) { return side.scale && !side.tiles.ConstantAlongDepth(); }

cudaError_t LaunchKind(const Problem& problem, const General& g, cudaStream_t stream) {
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
  std::string Run(const Buffers& buffers, cudaStream_t stream) const override {
    return LaunchGeneral(problem_, buffers, stream);
  }

 private:
  Problem problem_;
};

}  // namespace

std::unique_ptr<Plan> PlanGeneral(const Problem& problem, const Device&, size_t, std::string&) {
  return std::make_unique<GeneralPlan>(problem);
}

std::string LaunchGeneral(const Problem& problem, const Buffers& buffers, cudaStream_t stream) {
  std::string wrong = ClearAmax(problem, buffers, stream);
  if (!wrong.empty() || problem.batch * problem.rows * problem.columns == 0) return wrong;
  General g{};
  g.lhs = MakeOperand(problem.lhs, problem.rows, buffers.lhs, buffers.lhs_scale,
                      buffers.lhs_zero_point);
  g.rhs = MakeOperand(problem.rhs, problem.columns, buffers.rhs, buffers.rhs_scale,
                      buffers.rhs_zero_point);
  g.depth = problem.depth;
  g.tiles_across = (problem.columns + kTile - 1) / kTile;
  g.tiles_down = (problem.rows + kTile - 1) / kTile;
  g.elementwise = MakeElementwise(problem, buffers);
  return CudaError(LaunchKind(problem, g, stream), "the general kernel");
}

}  // namespace jaxfp8::cuda
