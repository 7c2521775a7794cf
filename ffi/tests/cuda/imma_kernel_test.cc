// The kernels of `sm80_imma`, run in software (simt.h): sums are exactly those of the codes that
// `jaxfp8.quantize` gives, for every dataflow, layout and shape; shared memory is accessed without
// races and without bank conflicts.

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/sm80_imma/line_scales.cuh"
#include "cuda/kernels/sm80_imma/mainloop.cuh"
#include "tests/cuda/simt.h"

namespace jaxfp8::cuda::imma {
namespace {

using tests::Expect;

std::mt19937 random_bits(5);

// ------------------------------------------------------------------------------- what is expected

// The code of a value, by division and in the order of jaxfp8/_call/reference/quantize_reference.py.
int CodeOf(float value, float step) {
  const float steps = value / step;
  if (std::isnan(steps)) return 0;
  return static_cast<int>(std::fmin(std::fmax(std::nearbyint(steps), -128.0f), 127.0f));
}

float ExpectedStep(const std::vector<float>& line) {
  float largest = 0;
  for (float value : line) {
    if (std::isfinite(value)) largest = std::fmax(largest, std::fabs(value));
  }
  const float step = largest * (1.0f / 127.0f);
  return step > 0 ? std::fmax(step, std::numeric_limits<float>::min()) : 1.0f;
}

// ------------------------------------------------------------------------------------------ sides

struct Shape {
  int lines, depth;
  bool mn_major = false;
  int shift = 0;  // elements off alignment
  int batches = 1;
  int apart = 0;  // more elements from line to line than there are along K; K is contiguous
};

// What lies around values, and would be the largest of any line.
template <DType kType>
Bits<kType> Largest() {
  constexpr float kLargest[] = {448.0f, 57344.0f, 65504.0f, 0x1.fep127f};
  if (kType == DType::kE4M3) return Encode<kType>(kLargest[0]);
  if (kType == DType::kE5M2) return Encode<kType>(kLargest[1]);
  return Encode<kType>(kLargest[kType == DType::kF16 ? 2 : 3]);
}

template <DType kType>
float WideValue(int draw) {
  switch (draw % 64) {
    case 0:
      return std::nanf("");
    case 1:
      return INFINITY;
    case 2:
      return -INFINITY;
    case 3:
      return 0.0f;
    default:
      return static_cast<float>(draw % 2001 - 1000) / 300.0f;
  }
}

// An operand with its values. Line 1 is zeros, line 2 has NaN and infinities only.
template <DType kType>
struct Side {
  Shape shape;
  std::vector<Bits<kType>> bits;
  std::vector<float> steps;
  Operand operand;

  explicit Side(const Shape& given) : shape(given) {
    const int pitch = (shape.mn_major ? shape.lines : shape.depth) + shape.apart;
    const int64_t size = int64_t{shape.mn_major ? shape.depth : shape.lines} * pitch;
    bits.assign(shape.batches * size + shape.shift + 16, Largest<kType>());
    operand.batch = shape.batches > 1 ? size : 0;
    operand.line = shape.mn_major ? 1 : pitch;
    operand.depth = shape.mn_major ? pitch : 1;
    FillValues();
    // Vectors are aligned to 16 bytes.
    operand.values = bits.data() + shape.shift;
    const auto bytes = static_cast<int64_t>(sizeof(bits[0]));
    operand.aligned = shape.shift == 0 && pitch * bytes % 16 == 0 && size * bytes % 16 == 0;
    if (kType == DType::kS8) return;
    for (int b = 0; b < shape.batches; ++b) {
      for (int l = 0; l < shape.lines; ++l) steps.push_back(ExpectedStep(Line(b, l)));
    }
    operand.step = steps.data();
    operand.step_batch = shape.batches > 1 ? shape.lines : 0;
  }
  Side(const Side&) = delete;

  void FillValues() {
    int next = 0;
    for (int b = 0; b < shape.batches; ++b) {
      for (int l = 0; l < shape.lines; ++l) {
        for (int k = 0; k < shape.depth; ++k) At(b, l, k) = Draw(l, next++);
      }
    }
  }

  Bits<kType> Draw(int line, int next) {
    const auto draw = static_cast<int>(random_bits() >> 1);
    if (SizeOf(kType) == 1) {
      if (line == 1 && kType != DType::kS8) return static_cast<Bits<kType>>(next % 2 ? 0x80 : 0);
      if (line == 2 && kType != DType::kS8) return static_cast<Bits<kType>>(0x7f | next << 7);
      // All codes, infinities and NaN among them, if the operand has so many.
      return static_cast<Bits<kType>>(line % 4 == 3 ? draw : next);
    }
    if (line == 1) return Encode<kType>(next % 2 ? -0.0f : 0.0f);
    if (line == 2) return Encode<kType>(WideValue<kType>(next % 3));
    return Encode<kType>(WideValue<kType>(draw));
  }

  Bits<kType>& At(int b, int l, int k) {
    return bits[shape.shift + b * operand.batch + l * operand.line + k * operand.depth];
  }

  std::vector<float> Line(int b, int l) {
    std::vector<float> values;
    for (int k = 0; k < shape.depth; ++k) values.push_back(Decode<kType>(At(b, l, k)));
    return values;
  }

  std::vector<int> Codes(int batch, int l) {
    const int b = shape.batches > 1 ? batch : 0;
    std::vector<int> codes;
    for (int k = 0; k < shape.depth && kType == DType::kS8; ++k) {
      codes.push_back(static_cast<int8_t>(At(b, l, k)));
    }
    if (kType == DType::kS8) return codes;
    const float step = steps[b * shape.lines + l];
    for (float value : Line(b, l)) codes.push_back(CodeOf(value, step));
    return codes;
  }
};

// --------------------------------------------------------------------------------------- products

simt::BankCounts counts;  // of all products

struct Case {
  int rows, columns, depth;
  bool mn_major = false;
  int splits = 1;
  int shift = 0;
  int batches = 1;
  bool shared_weights = false;  // by the batch
  bool rows_first = false;      // activations are [K, M]
  bool pieces = false;          // the output is computed piece by piece
  int apart = 0;                // more elements from line to line than there are in it
};

template <DType kActivation, Dataflow kFlow, DType kWeight, bool kMnMajor, int kRowFragments>
void Run(const Arguments& a, const BlockIndex& grid) {
  constexpr int kShared = kSharedBytes<Activations<kActivation, kFlow, kRowFragments>>;
  const simt::BankCounts launched = simt::Launch(grid, kThreads, kShared, [&] {
    MultiplyTile<kActivation, kFlow, kWeight, kMnMajor, kRowFragments>(a);
  });
  for (const auto& [kind, n] : launched.instructions) counts.instructions[kind] += n;
  for (const auto& [kind, n] : launched.conflicts) counts.conflicts[kind] += n;
}

template <DType kActivation, Dataflow kFlow, DType kWeight, bool kMnMajor, int kRowFragments>
void CheckLayout(const Case& c) {
  Side<kActivation> left({c.rows, c.depth, c.rows_first, c.shift, c.batches, c.apart});
  const int weight_batches = c.shared_weights ? 1 : c.batches;
  Side<kWeight> right({c.columns, c.depth, c.mn_major, c.shift, weight_batches, c.apart});
  Arguments a;
  a.rows = c.rows, a.columns = c.columns, a.depth = c.depth;
  a.activations = left.operand, a.weights = right.operand;
  if (c.rows_first) a.activations.aligned = false;
  a.pitch = (c.columns + 7) / 8 * 8;
  a.sums_batch = int64_t{c.rows} * a.pitch;
  // Where K is split the kernel adds; else it overwrites whatever is there.
  std::vector<int32_t> sums(c.batches * a.sums_batch, c.splits > 1 ? 0 : 0x55555555);
  a.sums = sums.data(), a.adds = c.splits > 1;
  a.row_tiles = (c.rows + 16 * kRowFragments - 1) / (16 * kRowFragments);
  a.depth_tiles = (c.depth + kTileDepth - 1) / kTileDepth;
  a.depth_tiles_per_split = (a.depth_tiles + c.splits - 1) / c.splits;
  const int column_tiles = (c.columns + kTileColumns - 1) / kTileColumns;
  if (c.pieces) {  // of one batch index and one row tile
    for (int b = 0; b < c.batches; ++b) {
      for (int r = 0; r < c.rows; r += 16 * kRowFragments) {
        Arguments piece = a;
        piece.first_batch = b, piece.first_row = r, piece.row_tiles = 1;
        piece.rows = std::min(c.rows, r + 16 * kRowFragments);
        piece.sums += b * a.sums_batch + r * a.pitch;
        Run<kActivation, kFlow, kWeight, kMnMajor, kRowFragments>(piece, {column_tiles, 1, 1});
      }
    }
  } else {
    Run<kActivation, kFlow, kWeight, kMnMajor, kRowFragments>(
        a, {a.row_tiles * column_tiles, c.splits, c.batches});
  }
  int64_t wrong = 0;
  for (int b = 0; b < c.batches; ++b) {
    std::vector<std::vector<int>> columns;
    for (int n = 0; n < c.columns; ++n) columns.push_back(right.Codes(b, n));
    for (int m = 0; m < c.rows; ++m) {
      const std::vector<int> row = left.Codes(b, m);
      for (int n = 0; n < c.columns; ++n) {
        int64_t sum = 0;
        for (int k = 0; k < c.depth; ++k) sum += row[k] * columns[n][k];
        wrong += sums[b * a.sums_batch + m * a.pitch + n] != sum;
      }
    }
  }
  Expect(wrong == 0, std::string(NameOf(kActivation)) + " x " + std::string(NameOf(kWeight)) +
                         (c.mn_major ? " [K, N] " : " [N, K] ") + std::to_string(c.rows) + "x" +
                         std::to_string(c.columns) + "x" + std::to_string(c.depth) + " flow " +
                         std::to_string(static_cast<int>(kFlow)) + " splits " +
                         std::to_string(c.splits) + " shift " + std::to_string(c.shift) + ": " +
                         std::to_string(wrong) + " sums are wrong");
}

template <DType kActivation, Dataflow kFlow, DType kWeight, int kRowFragments>
void Check(const Case& c) {
  if (c.mn_major) {
    CheckLayout<kActivation, kFlow, kWeight, true, kRowFragments>(c);
  } else {
    CheckLayout<kActivation, kFlow, kWeight, false, kRowFragments>(c);
  }
}

// Each dataflow, by the rows that it is for, on the same shapes.
template <DType kActivation, DType kWeight>
void CheckFlows(const Case& c) {
  if constexpr (SizeOf(kActivation) == 1) {
    Check<kActivation, Dataflow::kCodes, kWeight, 1>(c);
    Check<kActivation, Dataflow::kCodes, kWeight, 4>(c);
  } else {
    Check<kActivation, Dataflow::kRegisters, kWeight, 1>(c);
    Check<kActivation, Dataflow::kShared, kWeight, 4>(c);
  }
}

void CheckProducts() {
  for (bool mn_major : {false, true}) {
    // All codes of the weights, and more stages than there are in shared memory.
    const Case large{16, 128, 320, mn_major};
    CheckFlows<DType::kS8, DType::kE4M3>(large);
    CheckFlows<DType::kBF16, DType::kE5M2>(large);
    CheckFlows<DType::kF16, DType::kE4M3>(large);
    CheckFlows<DType::kE5M2, DType::kE4M3>(large);
    for (const auto& [m, n, k] : {std::array{1, 1, 1}, {3, 31, 47}, {17, 5, 64}, {65, 130, 70}}) {
      const Case odd{m, n, k, mn_major};
      CheckFlows<DType::kS8, DType::kE5M2>(odd);
      CheckFlows<DType::kBF16, DType::kE4M3>(odd);
    }
    // Lines that are further apart than they are long; [K, M]; a batch.
    const Case apart{.rows = 5, .columns = 40, .depth = 72, .mn_major = mn_major, .apart = 8};
    CheckFlows<DType::kBF16, DType::kE4M3>(apart);
    CheckFlows<DType::kE4M3, DType::kE5M2>(apart);
    CheckFlows<DType::kF16, DType::kE5M2>({.rows = 6,
                                           .columns = 32,
                                           .depth = 80,
                                           .mn_major = mn_major,
                                           .batches = 2,
                                           .shared_weights = mn_major,
                                           .rows_first = true});
    CheckFlows<DType::kE4M3, DType::kE4M3>(
        {.rows = 4, .columns = 32, .depth = 64, .mn_major = mn_major, .batches = 2});
    // Off alignment, where 16-byte copies would be possible otherwise.
    CheckFlows<DType::kF16, DType::kE4M3>(
        {.rows = 16, .columns = 32, .depth = 64, .mn_major = mn_major, .shift = 1});
    for (int splits : {2, 3, 5}) {
      const Case split{
          .rows = 2, .columns = 16, .depth = 300, .mn_major = mn_major, .splits = splits};
      CheckFlows<DType::kS8, DType::kE4M3>(split);
      CheckFlows<DType::kBF16, DType::kE4M3>(split);
    }
  }
  const Case pieces{.rows = 70, .columns = 20, .depth = 65, .batches = 2, .pieces = true};
  CheckFlows<DType::kS8, DType::kE4M3>(pieces);
  CheckFlows<DType::kBF16, DType::kE4M3>(pieces);
  // Nothing to sum.
  CheckFlows<DType::kBF16, DType::kE4M3>({3, 9, 0});
  using simt::Access;
  for (const Access kind : {Access::kLoad, Access::kStore, Access::kCopy, Access::kMatrix}) {
    Expect(counts.instructions[kind] > 100, "shared memory is accessed in all ways");
    Expect(counts.conflicts[kind] == 0, "bank conflicts of kind " +
                                            std::to_string(static_cast<int>(kind)) + ": " +
                                            std::to_string(counts.conflicts[kind]));
  }
}

// ---------------------------------------------------------------------------------- codes, scales

// Each code of FP8, and each 16-bit value, divided by all kinds of steps.
template <DType kType>
void CheckCodes() {
  for (const float step :
       {1.0f, 0.37f, 448.0f / 127, 57344.0f / 127, 0.0123f, 0x1p-16f / 127, 0x1p-126f, 0x1p120f}) {
    const Divisor divisor = MakeDivisor(step);
    for (uint32_t first = 0; first < 1u << (8 * SizeOf(kType)); first += 4) {
      uint32_t words[kWordsOfFour<kType>] = {}, want = 0;
      for (uint32_t i = 0; i < 4; ++i) {
        const auto bits = static_cast<Bits<kType>>(first + i);
        words[i * SizeOf(kType) / 4] |= uint32_t{bits} << (i * 8 * SizeOf(kType) % 32);
        want |= static_cast<uint32_t>(CodeOf(Decode<kType>(bits), step) & 0xff) << (8 * i);
      }
      if (Requantize<kType>(words, divisor) == want) continue;
      Expect(false, std::string(NameOf(kType)) + " codes from " + std::to_string(first) +
                        ", step " + std::to_string(step));
    }
  }
}

// The scales that values have already; none where no line has a tile.
struct Given {
  int tile_lines = 0;  // lines that share a scale
  std::vector<float> scales;
  Tiles tiles;

  Given() = default;
  Given(int tile_lines, const Shape& shape) : tile_lines(tile_lines) {
    const int count = (shape.lines + tile_lines - 1) / tile_lines;
    tiles = {tile_lines, std::max(shape.depth, 1), shape.batches > 1 ? count : 0, count > 1 ? 1 : 0,
             0};
    // Also some with which a product overflows, or becomes subnormal or 0.
    const float extremes[] = {0x1p125f, -0.75f, 0x1p-130f, 0.0f, -0x1p-90f, INFINITY};
    for (int i = 0; i < shape.batches * count; ++i) {
      const bool extreme = i % 4 == 1;
      scales.push_back(extreme ? extremes[i / 4 % 6]
                               : 0.25f + static_cast<float>(random_bits() % 4096) / 4096.0f);
    }
  }
};

template <DType kType, bool kMnMajor>
void CheckLineScalesOf(const Shape& shape, const Given& given) {
  Side<kType> side(shape);
  std::vector<float> want_scale = side.steps;
  for (int i = 0; i < shape.batches * shape.lines && given.tile_lines; ++i) {
    const auto tiles = static_cast<int>(given.scales.size()) / shape.batches;
    want_scale[i] *= given.scales[i / shape.lines * tiles + i % shape.lines / given.tile_lines];
  }
  std::vector<float> step(side.steps.size(), -1.0f), scale(step);
  const LineScaleArguments a{
      side.operand, shape.lines, shape.depth, given.tile_lines ? given.scales.data() : nullptr,
      given.tiles,  step.data(), scale.data()};
  const int blocks = kMnMajor ? (shape.lines + kLinesOfBlock - 1) / kLinesOfBlock : shape.lines;
  simt::Launch({blocks, 1, shape.batches}, kThreads, kLineScaleSharedBytes,
               [&] { FindLineScales<kType, kMnMajor>(a); });
  const std::string name = std::string(NameOf(kType)) + (kMnMajor ? " [K, N] " : " [N, K] ") +
                           std::to_string(shape.lines) + "x" + std::to_string(shape.depth) +
                           (side.operand.aligned ? " aligned" : "");
  Expect(step == side.steps, "steps of lines of " + name);
  Expect(scale == want_scale, "scales of lines of " + name);
}

template <DType kType>
void CheckLineScales() {
  for (const auto& [lines, depth] : {std::array{1, 1}, {5, 300}, {40, 70}, {3, 0}}) {
    const Shape rows{.lines = lines, .depth = depth, .shift = 1, .batches = 2};
    const Shape columns{.lines = lines, .depth = depth, .mn_major = true, .shift = 1, .batches = 2};
    CheckLineScalesOf<kType, false>(rows, Given(1, rows));
    CheckLineScalesOf<kType, true>(columns, Given(3, columns));
  }
  // 16 bytes at a time: nothing but them, values after the last ones, and too few for any; a thread
  // has several.
  for (const auto& [lines, depth, apart] :
       {std::array{5, 320, 0}, {4, 2064, 0}, {3, 4101, 11}, {9, 77, 3}, {4, 7, 9}, {3, 0, 16}}) {
    const Shape rows{.lines = lines, .depth = depth, .batches = 2, .apart = apart};
    CheckLineScalesOf<kType, false>(rows, Given());
    CheckLineScalesOf<kType, false>(rows, Given(lines, rows));
  }
}

// Wherever in an aligned line it is, the largest value is found.
template <DType kType>
void CheckEachPlace() {
  constexpr int kDepth = 70, kLines = 70;
  Side<kType> side({.lines = kLines, .depth = kDepth, .apart = 10});
  Expect(side.operand.aligned, "the lines are aligned");
  std::vector<float> step(kLines, -1.0f), scale(step), want(kLines, 3.0f * (1.0f / 127.0f));
  for (int l = 0; l < kLines; ++l) {
    for (int k = 0; k < kDepth; ++k) side.At(0, l, k) = Encode<kType>(k == l ? -3.0f : 1.5f);
  }
  const LineScaleArguments a{side.operand, kLines, kDepth, nullptr, {}, step.data(), scale.data()};
  simt::Launch({kLines, 1, 1}, kThreads, kLineScaleSharedBytes,
               [&] { FindLineScales<kType, false>(a); });
  Expect(step == want, "the largest value of a line of " + std::string(NameOf(kType)));
}

}  // namespace
}  // namespace jaxfp8::cuda::imma

int main() {
  using namespace jaxfp8::cuda::imma;
  using jaxfp8::DType;
  CheckCodes<DType::kE4M3>();
  CheckCodes<DType::kE5M2>();
  CheckCodes<DType::kBF16>();
  CheckCodes<DType::kF16>();
  CheckLineScales<DType::kE4M3>();
  CheckLineScales<DType::kE5M2>();
  CheckLineScales<DType::kBF16>();
  CheckLineScales<DType::kF16>();
  CheckEachPlace<DType::kE4M3>();
  CheckEachPlace<DType::kBF16>();
  CheckProducts();
  return jaxfp8::tests::Report("imma kernel");
}
