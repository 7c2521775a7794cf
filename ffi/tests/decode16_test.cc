// The decoding of the GPU kernel agrees with `common/decode.h`, for every code of every 8-bit type.

#include "cuda/kernels/common/decode16.cuh"

#include <cmath>
#include <cstdio>
#include <string>

#include "tests/expect.h"

namespace jaxfp8::cuda {
namespace {

using tests::Expect;

float Want(DType type, uint8_t code) {
  if (type == DType::kE4M3) return DecodeE4M3(code);
  if (type == DType::kE5M2) return DecodeE5M2(code);
  return type == DType::kS8 ? static_cast<float>(static_cast<int8_t>(code)) : code;
}

bool Same(float got, float want) {
  return (std::isnan(got) && std::isnan(want)) || BitsOf(got) == BitsOf(want);
}

// The four values of a word: byte 0 to 3.
template <DType kWeight, DType kWide>
void DecodeFour(uint32_t word, uint32_t sign_flip, uint32_t zero_addend, bool full_decode,
                float (&values)[4]) {
  using D = Decoder<kWeight, kWide>;
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t lanes = PickBytes(word, 0, pair == 0 ? 0x9180u : 0xb3a2u);
    const uint32_t decoded = full_decode ? D::template Decode<true>(lanes, sign_flip, zero_addend)
                                         : D::template Decode<false>(lanes, sign_flip, zero_addend);
    for (int lane = 0; lane < 2; ++lane) {
      values[2 * pair + lane] = WideLane<kWide>(decoded, lane) * D::kFactor;
    }
  }
}

// A code among three others, in every place of the word.
template <DType kWeight, DType kWide>
void CheckFloats() {
  using D = Decoder<kWeight, kWide>;
  for (uint32_t code = 0; code < 256; ++code) {
    for (int coord = 0; coord < 4; ++coord) {
      uint8_t bytes[4] = {0x01, 0x85, 0x3a, 0xf6};
      bytes[coord] = static_cast<uint8_t>(code);
      uint32_t word = 0;
      bool finite = true;
      for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(bytes[i]) << (8 * i);
      for (uint8_t byte : bytes) finite = finite && std::isfinite(Want(kWeight, byte));
      const std::string name = std::string(NameOf(kWeight)) + " code " + std::to_string(code);
      const bool special = D::SpecialBits(word) & 0x80808080u;
      if (D::kRestoresSpecials || D::kFlagsNaN) {
        Expect(special == !finite, name + " is noticed if not finite");
      }
      if constexpr (D::kFlagsNaN) {
        for (int i = 0; i < 4; ++i) {
          const bool nan = std::isnan(Want(kWeight, bytes[i]));
          Expect((D::IsNaN(word) >> (8 * i) & 0xff) == (nan ? 0x80u : 0u),
                 name + " spoils its own");
        }
      }
      float values[4];
      DecodeFour<kWeight, kWide>(word, 0, 0, D::kRestoresSpecials && special, values);
      for (int i = 0; i < 4; ++i) {
        const float want = Want(kWeight, bytes[i]);
        Expect((D::kFlagsNaN && std::isnan(want)) || Same(values[i], want), name + " is exact");
      }
    }
  }
}

template <DType kWide>
void CheckIntegers(DType type) {
  using D = Decoder<DType::kS8, kWide>;
  const int low = type == DType::kS8 ? -128 : 0;
  for (int zero = low; zero < low + 256; ++zero) {
    for (uint32_t code = 0; code < 256; ++code) {
      const uint32_t word = code | (code ^ 0xffu) << 8 | ((code + 85) & 0xffu) << 16 | 0x80000000u;
      float values[4];
      DecodeFour<DType::kS8, kWide>(word, D::SignFlip(type), D::ZeroPointAddend(type, zero),
                                    zero != 0 || type == DType::kU8, values);
      for (int i = 0; i < 4; ++i) {
        const float want =
            Want(type, static_cast<uint8_t>(word >> (8 * i))) - static_cast<float>(zero);
        Expect(values[i] == want, std::string(NameOf(type)) + " code less its zero point is exact");
      }
    }
  }
}

void CheckZeroPoints() {
  for (DType type : {DType::kS8, DType::kU8}) {
    for (int64_t zero :
         {int64_t{-2147483648}, int64_t{-129}, int64_t{-128}, int64_t{-1}, int64_t{0}, int64_t{127},
          int64_t{128}, int64_t{255}, int64_t{256}, int64_t{2147483647}}) {
      const ZeroPoint split = SplitZeroPoint(type, static_cast<int32_t>(zero));
      const int low = type == DType::kS8 ? -128 : 0;
      Expect(split.clamped >= low && split.clamped <= low + 255,
             "the border is a value of the type");
      const double sum = static_cast<double>(split.clamped) + split.excess;
      Expect(std::fabs(sum - static_cast<double>(zero)) <= std::ldexp(std::fabs(sum), -24),
             "border and excess make the zero point");
      for (int code = low; code < low + 256; ++code) {
        Expect((code - split.clamped) * static_cast<double>(-split.excess) >= 0,
               "both parts of a term have one sign");
      }
    }
  }
}

// The power and the factor of a scale make it again, and codes times the power are exact.
void CheckSplitScales() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {1.0f, 0.0123f, -3.7f, 1e-20f, 3e38f, 0x1p-126f, 0x1.8p-130f, 0x1p-149f,
                            -1e-40f, 0.0f, -0.0f, infinity, -infinity}) {
    const SplitScale split(scale);
    const float power = WideLane<DType::kBF16>(split.power, 0);
    Expect(Same(power * split.factor, scale), "power and factor make the scale");
    Expect(WideLane<DType::kBF16>(split.power, 1) == power, "both halves have the power");
    const bool subnormal = scale != 0 && std::fabs(scale) < 0x1p-126f;
    Expect(split.factor < 2 && (subnormal ? split.factor > 0 : split.factor >= 1),
           "the factor is within [1, 2)");
  }
  Expect(std::isnan(WideLane<DType::kBF16>(SplitScale(std::nanf("")).power, 0)), "NaN stays NaN");
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = Want(DType::kE4M3, static_cast<uint8_t>(code));
    const uint32_t power = SplitScale(0.0123f).power;
    if (std::isnan(value)) continue;
    const uint32_t scaled =
        FusedPair<DType::kBF16>(BothLanes<DType::kBF16>(value), power, 0x80008000u);
    Expect(Same(WideLane<DType::kBF16>(scaled, 0), value * WideLane<DType::kBF16>(power, 0)),
           "a code times a power is exact");
  }
}

}  // namespace
}  // namespace jaxfp8::cuda

int main() {
  using namespace jaxfp8;
  using namespace jaxfp8::cuda;
  CheckFloats<DType::kE4M3, DType::kBF16>();
  CheckFloats<DType::kE4M3, DType::kF16>();
  CheckFloats<DType::kE5M2, DType::kBF16>();
  CheckFloats<DType::kE5M2, DType::kF16>();
  for (DType type : {DType::kS8, DType::kU8}) {
    CheckIntegers<DType::kBF16>(type);
    CheckIntegers<DType::kF16>(type);
  }
  CheckZeroPoints();
  CheckSplitScales();
  return jaxfp8::tests::Report("decode16");
}
