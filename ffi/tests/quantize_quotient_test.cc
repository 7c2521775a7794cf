// The quotients of the quantizing kernels encode to the same codes as a division, and the index
// maps that transpose through shared memory are complete and free of bank conflicts.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "cuda/kernels/common/transpose.cuh"
#include "cuda/kernels/quantize/quotient.cuh"

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cuda;

template <DType kOut>
void CheckQuotient(float x, float scale) {
  const float divisor = scale == 0.0f ? 1.0f : scale;
  const int wanted = Encode<kOut>(x / divisor);
  const FloatDivisor made = MakeFloatDivisor(scale);
  const int short_way =
      InRange(std::fabs(x), made) ? Encode<kOut>(QuotientInRange(x, made)) : wanted;
  const int got = short_way == wanted ? Encode<kOut>(Quotient(x, made)) : short_way;
  // A NaN may come back with the other sign.
  if (wanted == got || std::isnan(x / divisor)) return;
  std::printf("%a / %a is code %d, not %d\n", x, scale, got, wanted);
  std::exit(1);
}

void CheckQuotients(float x, float scale) {
  CheckQuotient<DType::kE4M3>(x, scale);
  CheckQuotient<DType::kE5M2>(x, scale);
  CheckQuotient<DType::kS8>(x, scale);
}

// Checks numbers next to the midpoint of two codes, where one ulp changes the code.
void CheckHalfway(float scale) {
  for (int code = 0; code < 0x7e; ++code) {
    const float half =
        (DecodeE4M3(static_cast<uint8_t>(code)) + DecodeE4M3(static_cast<uint8_t>(code + 1))) / 2;
    const uint32_t bits = BitsOf(half * scale);
    for (uint32_t near = bits - 2; near != bits + 3; ++near) {
      CheckQuotients(FloatFromBits(near), scale);
      CheckQuotients(-FloatFromBits(near), scale);
    }
  }
  for (int step = 0; step < 128; ++step) {
    const uint32_t bits = BitsOf((static_cast<float>(step) + 0.5f) * scale);
    for (uint32_t near = bits - 2; near != bits + 3; ++near) {
      CheckQuotients(FloatFromBits(near), scale);
    }
  }
}

void CheckAllBF16(float scale) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    CheckQuotients(DecodeBF16(static_cast<uint16_t>(code)), scale);
  }
}

void CheckScale(float amax, float wanted, bool power_of_two = false) {
  const float scale = ScaleOf<DType::kE4M3>(amax, power_of_two);
  if (scale == wanted) return;
  std::printf("the scale of %a is %a, not %a\n", amax, scale, wanted);
  std::exit(1);
}

// A warp's 32 words lie in 32 banks.
template <typename Word>
void CheckWarp(const char* what, Word word) {
  std::set<int> banks;
  for (int lane = 0; lane < 32; ++lane) banks.insert(word(lane) % 32);
  if (banks.size() == 32) return;
  std::printf("%s: %zu banks instead of 32\n", what, banks.size());
  std::exit(1);
}

template <typename Map>
void CheckTranspose(const char* what, Map map) {
  std::set<int> cells;
  for (int line = 0; line < kTransposeTile; ++line) {
    for (int word = 0; word < kTransposeTile / 4; ++word) cells.insert(map(line, word));
  }
  if (cells.size() != kTransposeTile * kTransposeTile / 4 ||
      *cells.rbegin() >= kTransposeTile * kTransposeTile / 4) {
    std::printf("%s: the words of a tile share cells\n", what);
    std::exit(1);
  }
  for (int j = 0; j < 4; ++j) {
    for (int line = 0; line < kTransposeTile; line += 4) {
      CheckWarp(what, [&](int lane) { return map(line + lane / 8, lane % 8 * 4 + j); });
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(3);
  for (float scale :
       {0.0f, 1.0f, 3.0f, 0x1p-149f, 0x1p-127f, 0x1.8p-100f, 0x1p-81f, 0x1.fffffep-81f, 0x1p-80f,
        0x1p80f, 0x1.5p81f, 0x1.fffffep127f, INFINITY, -0.3f}) {
    CheckAllBF16(scale);
  }
  for (int i = 0; i < 3000; ++i) {
    const auto exponent = static_cast<int>(random() % 60) - 30;
    const float scale =
        std::ldexp(1.0f + static_cast<float>(random() % (1 << 23)) * 0x1p-23f, exponent);
    if (i < 20) CheckAllBF16(scale);
    CheckHalfway(scale);
  }
  for (int i = 0; i < 1000000; ++i) {  // any float by any scale
    CheckQuotients(FloatFromBits(random()), FloatFromBits(random() & 0x7fffffffu));
  }
  CheckScale(0.0f, 1.0f);
  CheckScale(448.0f, 448.0f * (1.0f / 448.0f));
  CheckScale(0x1p-126f, 0x1p-126f);
  CheckScale(0.0f, 1.0f, true);
  CheckScale(448.0f, 1.0f, true);
  CheckScale(0x1.c00002p8f, 1.0f, true);  // an ulp above 448
  CheckScale(0x1.c00008p8f, 2.0f, true);
  CheckScale(0x1p-140f, 0x1p-126f, true);
  CheckTranspose("PackSharedWord", PackSharedWord);
  CheckTranspose("CodesSharedWord", CodesSharedWord);
  for (int i = 0; i < 16; ++i) {
    CheckWarp("PackSharedWord, written",
              [&](int lane) { return PackSharedWord(lane % 8 * 16 + i, lane / 8); });
  }
  for (int i = 0; i < 8; ++i) {
    CheckWarp("CodesSharedWord, written",
              [&](int lane) { return CodesSharedWord(lane % 16 * 8 + i, lane / 16 * 2); });
  }
  std::puts("quotients, scales and transposes: right");
}
