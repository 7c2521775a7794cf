// Plans by cuBLASLt compute what the definition says. They run on the host, with stand-ins for the
// library and the kernels, so this tests layouts, offsets, pieces, padding, scales and workspace.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/cublaslt/attempts.h"
#include "cuda/cublaslt/layout.h"
#include "cuda/cublaslt/paths.h"
#include "tests/cublaslt_stand_ins.h"

namespace jaxfp8::cuda {
namespace {

// The operands of the definition.
double Value(const Side& side, const void* values, const float* scale, const int32_t* zero,
             int64_t b, int64_t f, int64_t k) {
  const double raw = Load(
      values, b * side.batch_stride + f * side.free_stride + k * side.depth_stride, side.dtype);
  const int64_t tile = side.tiles.At(b, f, k);
  return (raw - (side.zero_point ? zero[tile] : 0)) * (side.scale ? scale[tile] : 1.0f);
}

using Random = std::mt19937;

int64_t Draw(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

template <typename T>
T Pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[Draw(random, 0, static_cast<int64_t>(from.size()) - 1)];
}

// A problem with its buffers.
struct Case {
  Problem problem;
  Buffers buffers;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<int32_t>> integers;
  size_t outputs = 0;
  std::vector<uint8_t> out;

  // 256-byte aligned, as XLA's buffers are, and followed by NaN codes.
  uint8_t* Bytes(size_t count) {
    memory.emplace_back(count + 1024, 0x7f);
    auto at = reinterpret_cast<uintptr_t>(memory.back().data());
    return memory.back().data() + (256 - at % 256) % 256;
  }
  float* Floats(int64_t count, Random& random) {
    auto* to = reinterpret_cast<float*>(Bytes(4 * count));
    for (int64_t i = 0; i < count; ++i) to[i] = std::ldexp(1.0f + Draw(random, 0, 7) / 8.0f, -2);
    return to;
  }
  int32_t* SumsOf(const Side& side, const void* values, int64_t batches, int64_t lines,
                  int64_t depth);
};

// The sums of the lines of a side, as a caller gives them.
int32_t* Case::SumsOf(const Side& side, const void* values, int64_t batches, int64_t lines,
                      int64_t depth) {
  auto* sums = reinterpret_cast<int32_t*>(Bytes(4 * batches * lines));
  for (int64_t i = 0; i < batches * lines; ++i) {
    const int64_t first = i / lines * side.batch_stride + i % lines * side.free_stride;
    double sum = 0;
    for (int64_t k = 0; k < depth; ++k)
      sum += Load(values, first + k * side.depth_stride, side.dtype);
    sums[i] = static_cast<int32_t>(sum);
  }
  return sums;
}

void Fill(void* to, int64_t count, DType type, Random& random) {
  for (int64_t i = 0; i < count; ++i)
    Store(to, i, type, static_cast<double>(Draw(random, 0, 6)) - (type == DType::kU8 ? 0 : 3));
}

Side DrawSide(Case& made, DType type, int64_t batch, int64_t lines, int64_t depth, bool left,
              bool zero_points, const std::vector<int64_t>& depth_tiles, Random& random) {
  Side side;
  side.dtype = type;
  const bool transposed = Draw(random, 0, 2) == 0;
  const bool shared = Draw(random, 0, 3) == 0;
  side.free_stride = transposed ? 1 : depth;
  side.depth_stride = transposed ? lines : 1;
  if (lines == 1) side.depth_stride = 1, side.free_stride = depth;
  side.batch_stride = shared || batch == 1 ? 0 : lines * depth;
  const int64_t count = (side.batch_stride ? batch : 1) * lines * depth;
  void* values = made.Bytes(count * SizeOf(type));
  Fill(values, count, type, random);
  (left ? made.buffers.lhs : made.buffers.rhs) = values;
  if (zero_points && IsInt8(type) && Draw(random, 0, 1)) {
    side.sums = true;
    (left ? made.buffers.lhs_sums : made.buffers.rhs_sums) =
        made.SumsOf(side, values, side.batch_stride ? batch : 1, lines, depth);
  }
  side.scale = Draw(random, 0, 4) != 0;
  side.zero_point = zero_points && IsInt8(type) && Draw(random, 0, 1) == 1;
  if (!side.scale && !side.zero_point) return side;
  side.tiles.tile_free = Pick<int64_t>(random, {1, 1, 3, 128, lines});
  side.tiles.tile_depth =
      depth_tiles[Draw(random, 0, static_cast<int64_t>(depth_tiles.size()) - 1)];
  if (side.tiles.tile_depth == 0) side.tiles.tile_depth = depth;
  const int64_t across = (lines + side.tiles.tile_free - 1) / side.tiles.tile_free;
  const int64_t along = (depth + side.tiles.tile_depth - 1) / side.tiles.tile_depth;
  const bool by_batch = side.batch_stride && Draw(random, 0, 1) == 0;
  side.tiles.depth_stride = along > 1 ? 1 : 0;
  side.tiles.free_stride = across > 1 ? along : 0;
  side.tiles.batch_stride = by_batch ? across * along : 0;
  const int64_t scales = across * along * (by_batch ? batch : 1);
  if (side.scale)
    (left ? made.buffers.lhs_scale : made.buffers.rhs_scale) = made.Floats(scales, random);
  if (side.zero_point) {
    auto* zeros = reinterpret_cast<int32_t*>(made.Bytes(4 * scales));
    for (int64_t i = 0; i < scales; ++i) zeros[i] = static_cast<int32_t>(Draw(random, -200, 200));
    (left ? made.buffers.lhs_zero_point : made.buffers.rhs_zero_point) = zeros;
  }
  return side;
}

// A random plane, each axis of which is broadcast or full, and its size.
Plane DrawPlane(const Problem& p, DType type, Random& random, int64_t& size) {
  Plane plane{type, 0, 0, 0};
  size = 1;
  if (Draw(random, 0, 1)) plane.column_stride = p.columns > 1 ? 1 : 0, size *= p.columns;
  if (Draw(random, 0, 1)) plane.row_stride = p.rows > 1 ? size : 0, size *= p.rows;
  if (Draw(random, 0, 1)) plane.batch_stride = p.batch > 1 ? size : 0, size *= p.batch;
  return plane;
}

void DrawEpilogue(Case& made, bool plain, Random& random) {
  Problem& p = made.problem;
  int64_t size = 0;
  if (plain && IsWideFloat(p.out.dtype) && Draw(random, 0, 2) == 0) {
    p.residual = p.out;
    size = p.batch * p.rows * p.columns;
    void* residual = made.Bytes(SizeOf(p.out.dtype) * size);
    Fill(residual, size, p.out.dtype, random);
    made.buffers.residual = residual;
  }
  if (!plain && Draw(random, 0, 1)) {
    p.residual = DrawPlane(p, DType::kBF16, random, size);
    void* residual = made.Bytes(2 * size);
    Fill(residual, size, DType::kBF16, random);
    made.buffers.residual = residual;
  }
  if (!plain && Draw(random, 0, 1)) {
    p.bias = DrawPlane(p, DType::kF32, random, size);
    made.buffers.bias = made.Floats(size, random);
  }
  if (!plain && Draw(random, 0, 1)) p.activation = Activation::kRelu;
  if (!plain && Draw(random, 0, 1)) {
    p.amax = DrawPlane(p, DType::kF32, random, size);
    made.buffers.amax = made.Floats(size, random);
  }
  if (IsEightBit(p.out.dtype)) {
    p.out_scale = DrawPlane(p, DType::kF32, random, size);
    made.buffers.out_scale = made.Floats(size, random);
  }
  const size_t count = p.batch * p.rows * p.columns;
  made.buffers.out = made.Bytes(count * SizeOf(p.out.dtype));
  made.outputs = count;
}

void Define(const Case& made, std::vector<double>& out, std::vector<double>& slack) {
  const Problem& p = made.problem;
  const Buffers& buffers = made.buffers;
  std::vector<double> left(p.rows * p.depth), right(p.columns * p.depth);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t k = 0; k < p.depth; ++k) {
      for (int64_t r = 0; r < p.rows; ++r) {
        left[r * p.depth + k] =
            Value(p.lhs, buffers.lhs, buffers.lhs_scale, buffers.lhs_zero_point, b, r, k);
      }
      for (int64_t c = 0; c < p.columns; ++c) {
        right[c * p.depth + k] =
            Value(p.rhs, buffers.rhs, buffers.rhs_scale, buffers.rhs_zero_point, b, c, k);
      }
    }
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t c = 0; c < p.columns; ++c) {
        double y = 0, size = 0;
        for (int64_t k = 0; k < p.depth; ++k) {
          const double term = left[r * p.depth + k] * right[c * p.depth + k];
          y += term;
          size += std::abs(term);
        }
        if (p.residual) y += Load(buffers.residual, p.residual.At(b, r, c), p.residual.dtype);
        if (p.bias) y += buffers.bias[p.bias.At(b, r, c)];
        y = Apply(p.activation, y);
        if (p.out_scale) y /= buffers.out_scale[p.out_scale.At(b, r, c)];
        out.push_back(y);
        slack.push_back(size);
      }
    }
  }
}

double Tolerance(DType type) {
  switch (type) {
    case DType::kBF16:
      return 1.0 / 128;
    case DType::kF16:
      return 1.0 / 1024;
    case DType::kF32:
      return 1e-5;
    case DType::kS32:
      return 0;
    default:
      return 1.0 / 8;
  }
}

bool Saturated(DType type, double y) {
  return IsEightBit(type) && std::abs(y) > (IsFloat8(type) ? 400 : 100);
}

void Check(Case& made, const Path& path, const Device& device, size_t workspace,
           const std::string& name) {
  const std::string why_not = path.why_not(made.problem, device).message();
  if (!why_not.empty()) {
    const bool excused = why_not.find("the contracted axis") != std::string::npos ||
                         why_not.find("exact sums") != std::string::npos ||
                         why_not.find("float8_e5m2 by") != std::string::npos;
    Expect(excused, name + "refused: " + why_not);
    return;
  }
  std::unique_ptr<Plan> plan;
  const Status planned = path.make_plan(made.problem, device, workspace, plan);
  Expect(planned.ok(), name + "no plan: " + planned.message());
  if (!plan) return;
  // Filled with NaN, so that an output that is not written is seen.
  std::memset(made.buffers.out, 0x7f, made.outputs * SizeOf(made.problem.out.dtype));
  made.buffers.workspace = made.Bytes(workspace);
  made.buffers.workspace_bytes = workspace;
  std::memset(made.buffers.workspace, 0x7f, workspace);
  const Status run = plan->Run(made.buffers, nullptr);
  Expect(run.ok(), name + run.message());
  for (size_t i = 0; i < 64; ++i) {
    Expect(static_cast<uint8_t*>(made.buffers.workspace)[workspace + i] == 0x7f,
           name + "nothing is written past the workspace");
  }
  std::vector<double> expected, slack;
  Define(made, expected, slack);
  const DType type = made.problem.out.dtype;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double got = Load(made.buffers.out, static_cast<int64_t>(i), type);
    const double bound = Tolerance(type) * (std::abs(expected[i]) + 1e-2) + 1e-5 * slack[i] +
                         (IsInt8(type) ? 0.51 : 0);
    const bool fine = Saturated(type, expected[i]) || std::abs(got - expected[i]) <= bound ||
                      (type == DType::kU8 && expected[i] < 0 && got == 0);
    if (fine) continue;
    Expect(false, name + "output " + std::to_string(i) + " is " + std::to_string(got) +
                      ", expected " + std::to_string(expected[i]));
    return;
  }
}

// The tiles of DeepSeek-V3: activations by 1 x 128, weights by 128 x 128.
void BlockScales(Case& made, Random& random) {
  Problem& p = made.problem;
  const int64_t blocks = (p.depth + 127) / 128, along = blocks > 1 ? 1 : 0;
  p.lhs.scale = p.rhs.scale = true;
  p.lhs.tiles = {1, 128, 0, p.rows > 1 ? blocks : 0, along};
  p.rhs.tiles = {128, 128, 0, p.columns > 128 ? blocks : 0, along};
  made.buffers.lhs_scale = made.Floats(p.rows * blocks, random);
  made.buffers.rhs_scale = made.Floats((p.columns + 127) / 128 * blocks, random);
}

// One scale for each 8-bit side.
void ShareScales(Case& made) {
  for (Side* side : {&made.problem.lhs, &made.problem.rhs}) {
    side->tiles = Tiles{};
    if (IsEightBit(side->dtype)) continue;
    side->scale = false;
    (side == &made.problem.lhs ? made.buffers.lhs_scale : made.buffers.rhs_scale) = nullptr;
  }
}

struct Kind {
  const Path* path;
  std::vector<std::pair<DType, DType>> types;
  std::vector<DType> outs;
  std::vector<int64_t> depth_tiles;  // 0 for the whole depth
  bool zero_points;
};

void CheckKind(const Kind& kind, int compute_capability, int cases, int64_t most, size_t workspace,
               unsigned seed) {
  Random random(seed);
  Device device;
  device.compute_capability = compute_capability;
  device.cublaslt_version = 130100;
  for (int i = 0; i < cases; ++i) {
    Case made;
    Problem& p = made.problem;
    const bool even = Draw(random, 0, 2) == 0;
    const auto size = [&] {
      return even ? 16 * Draw(random, 1, most / 16) : Draw(random, 1, most);
    };
    p.batch = Draw(random, 0, 2) ? 1 : Draw(random, 2, 3);
    p.rows = size(), p.columns = size(), p.depth = even ? 128 * Draw(random, 1, 3) : size();
    const auto types = kind.types[Draw(random, 0, static_cast<int64_t>(kind.types.size()) - 1)];
    p.lhs = DrawSide(made, types.first, p.batch, p.rows, p.depth, true, kind.zero_points,
                     kind.depth_tiles, random);
    p.rhs = DrawSide(made, types.second, p.batch, p.columns, p.depth, false, kind.zero_points,
                     kind.depth_tiles, random);
    p.out = {kind.outs[Draw(random, 0, static_cast<int64_t>(kind.outs.size()) - 1)],
             p.rows * p.columns, p.columns, 1};
    const bool integers = kind.path == &kCublasLtInt8;
    const int64_t grain = integers ? 2 : Draw(random, 0, 4);
    if (grain == 0) ShareScales(made);
    if (grain == 1 && kind.path == &kCublasLtFp8) BlockScales(made, random);
    if (p.out.dtype == DType::kS32) p.lhs.scale = p.rhs.scale = false;
    const bool plain = p.out.dtype == DType::kS32 || grain == 0 || Draw(random, 0, 1);
    DrawEpilogue(made, plain, random);
    if (grain == 0)
      p.out_scale.batch_stride = p.out_scale.row_stride = p.out_scale.column_stride = 0;
    refuse_unpadded = Draw(random, 0, 3) == 0;
    Check(made, *kind.path, device, workspace,
          std::string(kind.path->name) + " on " + std::to_string(compute_capability) + ", case " +
              std::to_string(i) + " of seed " + std::to_string(seed) + ": ");
  }
}

// Our epilogue scales the sums where the library's tiles would leave the device idle.
void CheckVectors() {
  Device hopper;
  hopper.compute_capability = 90, hopper.multiprocessors = 132;
  Problem p;
  p.lhs.dtype = p.rhs.dtype = DType::kE4M3;
  p.lhs.scale = p.rhs.scale = true;
  p.lhs.tiles.free_stride = p.rhs.tiles.free_stride = 1;
  p.out.dtype = DType::kBF16;
  for (const auto& [rows, columns, depth, ours] :
       {std::tuple(1, 4096, 4096, true), std::tuple(4096, 64, 4096, true),
        std::tuple(129, 4096, 4096, false), std::tuple(2, 14336, 4096, false),
        std::tuple(1, 14336, 4096, true), std::tuple(1, 4096, 2048, false)}) {
    p.rows = rows, p.columns = columns, p.depth = depth;
    const Scaling first = Attempts(p, hopper).front().scaling;
    Expect(first == (ours ? Scaling::kEpilogue : Scaling::kOuterVectors),
           std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(depth) +
               ": who scales");
  }
}

// The library applies ReLU to FP8 with scales of whole tensors, and to nothing else.
void CheckRelu() {
  Device hopper;
  hopper.compute_capability = 90;
  Problem p;
  p.lhs.dtype = p.rhs.dtype = DType::kE4M3;
  p.rows = p.columns = p.depth = 512;
  p.out = {DType::kBF16, 0, 512, 1};
  p.activation = Activation::kRelu;
  const auto by_library = [&](const Problem& problem) {
    return Attempts(problem, hopper).front().scaling != Scaling::kEpilogue;
  };
  Expect(by_library(p), "ReLU of FP8");
  Problem other = p;
  other.rhs.dtype = DType::kBF16;
  Expect(!by_library(other), "ReLU of FP8 by bfloat16");
  other.lhs.dtype = other.rhs.dtype = DType::kE5M2;
  Expect(!by_library(other), "ReLU of e5m2, which is multiplied in 16 bits");
  other = p, other.residual = other.out;
  Expect(!by_library(other), "ReLU behind a residual");
  other = p, other.lhs.scale = other.rhs.scale = true, other.rhs.tiles.free_stride = 1;
  Expect(!by_library(other), "ReLU with scales of columns");
  other = p, other.activation = Activation::kGeluTanh;
  Expect(!by_library(other), "GELU");
}

}  // namespace
}  // namespace jaxfp8::cuda

int main() {
  using namespace jaxfp8::cuda;
  using enum jaxfp8::DType;
  const Kind fp8{&kCublasLtFp8,
                 {{kE4M3, kE4M3}, {kE4M3, kE5M2}, {kE5M2, kE4M3}, {kE5M2, kE5M2}},
                 {kF32, kBF16, kBF16, kF16, kE4M3, kE4M3, kS8},
                 {0, 0, 128, 128, 64, 256, 48},
                 false};
  const Kind int8{&kCublasLtInt8,
                  {{kS8, kS8}, {kU8, kS8}, {kS8, kU8}, {kU8, kU8}},
                  {kF32, kBF16, kS32, kS8, kU8},
                  {0, 0, 0, 64, 128},
                  true};
  const Kind wide{&kCublasLtWide,
                  {{kBF16, kE4M3}, {kF16, kE5M2}, {kE5M2, kE5M2}, {kBF16, kS8}, {kU8, kF16}},
                  {kF32, kBF16, kF16, kE5M2},
                  {0, 0, 0, 128},
                  false};
  constexpr size_t kRoom = size_t{8} << 20, kLittle = size_t{640} << 10;
  CheckKind(fp8, 90, 160, 110, kRoom, 1);
  CheckKind(fp8, 100, 40, 110, kRoom, 2);
  CheckKind(int8, 80, 80, 110, kRoom, 3);
  CheckKind(wide, 90, 60, 110, kRoom, 4);
  CheckVectors();
  CheckRelu();
  // Too little workspace for one piece: pieces along every axis.
  CheckKind(fp8, 90, 4, 600, 3 * kLittle, 5);
  CheckKind(int8, 90, 4, 600, 3 * kLittle, 6);
  CheckKind(wide, 80, 4, 600, 4 * kLittle, 7);
  // Every way was tried.
  Expect(modes_seen[CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F] > 0, "scalar scales");
  Expect(modes_seen[CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F] > 0, "vectors of scales");
  Expect(modes_seen[CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F] > 0, "1 x 128 scales");
  Expect(modes_seen[CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F] > 0, "128 x 128 scales");
  Expect(encoded > 0, "FP8 outputs by the library");
  Expect(accumulated > 0 && added > 0 && batched > 0 && transposed > 0,
         "pieces of K, residuals by the library, batches per call, MN-major sides in place");
  return jaxfp8::tests::Report("cublaslt product");
}
