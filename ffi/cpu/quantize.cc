#include "cpu/quantize.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/decode.h"
#include "common/quantize_scale.h"
#include "cpu/features.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/quantize/quantize_kernel.h"

namespace jaxfp8 {
namespace {

// The least values of a share, about 20 us of work: waking a thread for less does not pay.
constexpr int64_t kMinShare = 64 << 10;
constexpr int64_t kQuantizeSharesPerThread = 3;
// The largest tile read twice by one thread: 256 KB of float32 stay in L2.
constexpr int64_t kSmallTile = 64 << 10;

struct InstructionSet {
  std::string_view name;
  unsigned needs;  // Feature bits
  QuantizeKernel (*kernel_of)(DType in, DType out);
};

constexpr InstructionSet kSets[] = {
#ifdef JAXFP8_X86
    {"avx512", kAvx512, avx512::QuantizeKernelOf},
    {"avx2", kAvx2, avx2::QuantizeKernelOf},
#endif
    {"scalar", 0, scalar::QuantizeKernelOf},
};

bool Available(const InstructionSet& set) { return !(set.needs & ~CpuFeatures()); }

const InstructionSet* Find(std::string_view name) {
  for (const InstructionSet& set : kSets) {
    if (Available(set) && (name.empty() || set.name == name)) return &set;
  }
  return nullptr;
}

float ChosenScale(const QuantizeProblem& problem, float amax) {
  switch (problem.out) {
    case DType::kE4M3:
      return ScaleOf<DType::kE4M3>(amax, problem.power_of_two);
    case DType::kE5M2:
      return ScaleOf<DType::kE5M2>(amax, problem.power_of_two);
    default:
      return ScaleOf<DType::kS8>(amax, problem.power_of_two);
  }
}

// Tiles as wide as the matrix are contiguous: the matrix becomes one row of tiles.
QuantizeProblem Flat(QuantizeProblem problem) {
  if (problem.tile_columns < problem.columns) return problem;
  problem.tile_columns = std::min(problem.tile_rows, problem.rows) * problem.columns;
  problem.columns *= problem.rows;
  problem.rows = problem.tile_rows = 1;
  return problem;
}

struct Area {
  int64_t row, column, rows, columns;
};

class Quantizer {
 public:
  Quantizer(const QuantizeProblem& problem, const QuantizeBuffers& buffers, QuantizeKernel kernel,
            Pool& pool)
      : problem_(Flat(problem)), buffers_(buffers), kernel_(kernel), pool_(pool) {}

  void Run() const {
    const Area first = TileAt(0);
    if (first.rows * first.columns > kSmallTile) {
      for (int64_t tile = 0; tile < Tiles(); ++tile) QuantizeByPieces(tile);
    } else {
      EachTile([&](int64_t tile) { QuantizeTile(tile); });
    }
  }

  // Writes only the amax of each tile. NaN wins over infinity.
  void FindAmax() const {
    EachTile([&](int64_t tile) { buffers_.amax[tile] = FloatFromBits(MagnitudeOf(TileAt(tile))); });
  }

 private:
  int64_t Tiles() const { return problem_.tiles_down() * problem_.tiles_across(); }

  template <typename F>
  void EachTile(const F& f) const {
    const int64_t tiles = Tiles();
    const int64_t shares = std::min(Shares(problem_.rows * problem_.columns), tiles);
    EachShare(shares, [&](int64_t share) {
      const int64_t end = tiles * (share + 1) / shares;
      for (int64_t tile = tiles * share / shares; tile < end; ++tile) f(tile);
    });
  }

  void EachShare(int64_t shares, const std::function<void(int64_t)>& body) const {
    ParallelFor(pool_, pool_.threads(), shares, body);
  }

  int64_t Shares(int64_t values) const {
    return std::clamp<int64_t>(values / kMinShare, 1, kQuantizeSharesPerThread * pool_.threads());
  }

  Area TileAt(int64_t tile) const {
    const int64_t row = tile / problem_.tiles_across() * problem_.tile_rows;
    const int64_t column = tile % problem_.tiles_across() * problem_.tile_columns;
    return {row, column, std::min(problem_.tile_rows, problem_.rows - row),
            std::min(problem_.tile_columns, problem_.columns - column)};
  }

  void QuantizeTile(int64_t tile) const {
    const Area area = TileAt(tile);
    if (LooksFirst()) Settle(tile, Largest(area));
    Encode(area, buffers_.scale[tile]);
  }

  void QuantizeByPieces(int64_t tile) const {
    const Area area = TileAt(tile);
    const int64_t count = Shares(area.rows * area.columns);
    std::vector<float> largest(count);
    if (LooksFirst()) {
      EachShare(count, [&](int64_t i) { largest[i] = Largest(Piece(area, i, count)); });
      Settle(tile, *std::max_element(largest.begin(), largest.end()));
    }
    EachShare(count, [&](int64_t i) { Encode(Piece(area, i, count), buffers_.scale[tile]); });
  }

  uint32_t MagnitudeOf(const Area& area) const {
    uint32_t largest = 0;
    for (int64_t row = 0; row < area.rows; ++row) {
      largest = std::max(largest, kernel_.magnitude(ValuesAt(area, row), area.columns));
    }
    return largest;
  }

  // Part `index` of `count` of an area, cut along rows, or along columns if there is one row.
  static Area Piece(const Area& area, int64_t index, int64_t count) {
    const auto cut = [&](int64_t size) {
      const int64_t start = size * index / count;
      return std::pair(start, size * (index + 1) / count - start);
    };
    if (area.rows > 1) {
      const auto [start, size] = cut(area.rows);
      return {area.row + start, area.column, size, area.columns};
    }
    const auto [start, size] = cut(area.columns);
    return {area.row, area.column + start, 1, size};
  }

  // Whether the amax of a tile is needed before its codes.
  bool LooksFirst() const { return problem_.amax || !problem_.given_scale; }

  void Settle(int64_t tile, float amax) const {
    if (!problem_.given_scale) buffers_.scale[tile] = ChosenScale(problem_, amax);
    if (buffers_.amax) buffers_.amax[tile] = amax;
  }

  float Largest(const Area& area) const {
    float largest = 0;
    for (int64_t row = 0; row < area.rows; ++row) {
      largest = std::max(largest, kernel_.largest(ValuesAt(area, row), area.columns));
    }
    return largest;
  }

  void Encode(const Area& area, float scale) const {
    const float own = scale == 0.0f && !problem_.plain ? 1.0f : scale;
    const float lowest = static_cast<float>(problem_.lowest);
    for (int64_t row = 0; row < area.rows; ++row) {
      uint8_t* codes = static_cast<uint8_t*>(buffers_.codes) + Offset(area, row);
      kernel_.encode(ValuesAt(area, row), area.columns, own, problem_.multiplies, lowest, codes);
    }
  }

  int64_t Offset(const Area& area, int64_t row) const {
    return (area.row + row) * problem_.columns + area.column;
  }

  const uint8_t* ValuesAt(const Area& area, int64_t row) const {
    return static_cast<const uint8_t*>(buffers_.x) + Offset(area, row) * SizeOf(problem_.in);
  }

  const QuantizeProblem problem_;
  const QuantizeBuffers& buffers_;
  const QuantizeKernel kernel_;
  Pool& pool_;
};

}  // namespace

Status QuantizeWhyNot(const QuantizeProblem& problem, std::string_view name) {
  JAXFP8_RETURN_IF_ERROR(WhyNotSizes(problem));
  if (!IsWideFloat(problem.in)) {
    return "`x` is " + std::string(NameOf(problem.in)) +
           ", but needs to be float32, bfloat16 or float16";
  }
  if (!IsFloat8(problem.out) && problem.out != DType::kS8) {
    return "attribute `out_dtype` needs to be float8_e4m3fn, float8_e5m2 or int8";
  }
  if (problem.transposed || problem.transposed_scale) {
    return "attributes `transposed` and `transposed_scale` are for GPUs";
  }
  if (problem.multiplies && !(problem.plain && problem.given_scale)) {
    return "attribute `multiplies` needs `plain` and `given_scale`";
  }
  if (problem.lowest < -128 || problem.lowest > 0) {
    return "attribute `lowest` is " + std::to_string(problem.lowest) +
           ", but needs to be from -128 to 0";
  }
  if (Find(name)) return {};
  std::string known;
  for (const InstructionSet& set : kSets) {
    if (Available(set)) known += (known.empty() ? "" : ", ") + std::string(set.name);
  }
  return "attribute `kernel` is `" + std::string(name) + "`, but this CPU needs one of: " + known;
}

void Quantize(const QuantizeProblem& problem, const QuantizeBuffers& buffers, std::string_view name,
              Pool& pool) {
  if (problem.rows == 0 || problem.columns == 0) return;
  const QuantizeKernel kernel = Find(name)->kernel_of(problem.in, problem.out);
  Quantizer(problem, buffers, kernel, pool).Run();
}

void FindRowAmax(const void* x, DType type, int64_t rows, int64_t columns, float* amax,
                 Pool& pool) {
  QuantizeProblem problem;
  problem.in = type;
  problem.rows = rows;
  problem.columns = problem.tile_columns = columns;
  std::fill_n(amax, problem.rows, 0.0f);  // the amax of an empty row
  if (problem.rows == 0 || problem.columns == 0) return;
  QuantizeBuffers buffers;
  buffers.x = x;
  buffers.amax = amax;
  const QuantizeKernel kernel = Find("")->kernel_of(problem.in, DType::kS8);
  Quantizer(problem, buffers, kernel, pool).FindAmax();
}

}  // namespace jaxfp8
