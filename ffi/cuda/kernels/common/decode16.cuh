// Decodes 8-bit weights to pairs of bfloat16 or float16 in registers, exactly for every code.
//
//   4 codes in a word      | c3 | c2 | c1 | c0 |
//       PickBytes          | s1.. | c1 | s0.. | c0 |      two codes, sign-extended to 16 bits
//       Decode             |  bf16/f16 |  bf16/f16 |      two values
//
// FP8: a shift puts exponent and mantissa into the wide type's fields. Its exponent bias is larger:
// the pair is the value times a power of two.
//   float16   The power of two is left to the scale (kFactor). Products of subnormals are exact.
//   bfloat16  It would be 2^-120, and accumulators would underflow in float32. An exact
//             multiplication takes it away.
// Only infinity and NaN come out wrong. They are rare: `SpecialBits` finds them four at a time, and
// only then is work done for them:
//   e4m3              NaN makes its whole column NaN, anywhere in K (`IsNaN`).
//   e5m2 to bfloat16  The codes are decoded again with `RestoreSpecials`.
//   e5m2 to float16   Nothing is wrong: e5m2 is the upper byte of float16.
// Integers: the bits enter the mantissa of a power of two. An exact subtraction takes the power
// away. The code minus its zero point is within [-255, 255], exact in both types, if the zero point
// is a value of the code's type (`ZeroPoint`).
//
// Everything runs on the host too: a test checks all codes there.

#pragma once

#include <cstdint>

#include "common/decode.h"
#include "common/dtype.h"
#include "common/encode.h"
#include "common/platform.h"

namespace jaxfp8::cuda {

template <DType kWide>
JAXFP8_HD float WideLane(uint32_t pair, int lane) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * lane));
  return kWide == DType::kBF16 ? DecodeBF16(bits) : DecodeF16(bits);
}

template <DType kWide>
JAXFP8_HD uint32_t BothLanes(float value) {
  const uint32_t bits = kWide == DType::kBF16 ? EncodeBF16(value) : EncodeF16(value);
  return bits | bits << 16;
}

// a * b + c in each half of a word, rounded once. Subnormals are kept.
template <DType kWide>
JAXFP8_HD uint32_t FusedPair(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  if constexpr (kWide == DType::kBF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  }
  return result;
#else
  uint32_t result = 0;
  for (int lane = 0; lane < 2; ++lane) {
    const double product = static_cast<double>(WideLane<kWide>(a, lane)) * WideLane<kWide>(b, lane);
    const float value = RoundToOdd(product + WideLane<kWide>(c, lane));
    const uint32_t bits = kWide == DType::kBF16 ? EncodeBF16(value) : EncodeF16(value);
    result |= bits << (16 * lane);
  }
  return result;
#endif
}

// Picks four bytes of (low, high), numbered 0 to 7, by the nibbles of `selector`. A nibble of 8 + i
// gives eight copies of the top bit of byte i.
JAXFP8_HD uint32_t PickBytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
  return picked;
#else
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const int from = static_cast<int>(selector >> (4 * i)) & 15;
    const auto byte = static_cast<uint32_t>(both >> (8 * (from & 7))) & 0xff;
    picked |= (from < 8 ? byte : byte >> 7 ? 0xffu : 0u) << (8 * i);
  }
  return picked;
#endif
}

// The kernel's form of a zero point. One outside the code's type is clamped to the type's range,
// and the rest, `excess`, multiplies the sum of the activations afterwards. Both parts then have
// the same sign for every code, and splitting loses no precision: |q - z| = |q - clamped| +
// |excess|.
struct ZeroPoint {
  int32_t clamped;
  float excess;
};

JAXFP8_HD ZeroPoint SplitZeroPoint(DType weight, int32_t zero_point) {
  const int32_t low = weight == DType::kS8 ? -128 : 0, high = low + 255;
  const int32_t raised = zero_point < low ? low : zero_point;
  const int32_t clamped = raised > high ? high : raised;
  // In 64 bits: the difference of two int32 may not fit one.
  return {clamped, static_cast<float>(static_cast<int64_t>(zero_point) - clamped)};
}

// A scale as a factor and a power of two. A word holds the power in both halves, as bfloat16. Codes
// times the power are exact in bfloat16, except products below 2^-126. The factor is within [1, 2);
// for a subnormal scale it is smaller. The power of 0, infinity and NaN is the scale itself.
struct SplitScale {
  uint32_t power;
  float factor;

  JAXFP8_HD explicit SplitScale(float scale) : factor(1.0f) {
    constexpr uint32_t kMantissa = 0x007fffffu, kExponent = 0x7f800000u, kMinNormal = 0x00800000u;
    uint32_t bits = BitsOf(scale);
    if ((bits & kMantissa) != 0 && (bits & kExponent) != kExponent) {
      const bool subnormal = (bits & kExponent) == 0;
      if (subnormal) bits |= kMinNormal;
      factor = subnormal ? FloatFromBits(bits & 0x7fffffffu) * 0x1p126f - 1.0f
                         : FloatFromBits((bits & kMantissa) | 0x3f800000u);
      bits &= ~kMantissa;
    }
    const uint32_t upper = (bits & kMantissa) != 0 ? 0x7fc0u : bits >> 16;
    power = upper | upper << 16;
  }
};

template <DType kWeight, DType kWide>
struct Decoder {
  static_assert(kWeight == DType::kS8 || IsFloat8(kWeight));  // uint8 is int8 after `SignFlip`
  static_assert(kWide == DType::kBF16 || kWide == DType::kF16);
  static constexpr bool kInteger = kWeight == DType::kS8;
  static constexpr bool kBrain = kWide == DType::kBF16;
  // How infinity and NaN are corrected.
  static constexpr bool kFlagsNaN = kWeight == DType::kE4M3;
  static constexpr bool kRestoresSpecials = kWeight == DType::kE5M2 && kBrain;
  // Whether subtracting a zero point takes an extra instruction.
  static constexpr bool kSubtractsZeroPoint = kInteger && kBrain;

  // The value is the decoded value times this.
  static constexpr float kFactor = kWeight == DType::kE4M3 && !kBrain ? 256.0f : 1.0f;

  // XORed with the codes of one integer type, gives codes of the other, decodable type.
  JAXFP8_HD static uint32_t SignFlip(DType weight) {
    return kInteger && (weight == DType::kU8) == kBrain ? 0x00800080u : 0;
  }

  // Added by `Decode` to both codes of a pair to subtract their zero point.
  JAXFP8_HD static uint32_t ZeroPointAddend(DType weight, int32_t zero_point) {
    const int32_t centred = weight == DType::kU8 ? zero_point - 128 : zero_point;
    return BothLanes<kWide>(static_cast<float>(kBrain ? -centred : -1152 - centred));
  }

  // Decodes two sign-extended codes.
  //   kFullDecode  subtract zero points, and restore infinity and NaN; else there are none
  template <bool kFullDecode>
  JAXFP8_HD static uint32_t Decode(uint32_t codes, uint32_t sign_flip, uint32_t zero_addend) {
    if constexpr (!kInteger) {
      return kFullDecode && kRestoresSpecials ? RestoreSpecials(Float(codes)) : Float(codes);
    } else if constexpr (kBrain) {
      const uint32_t pair = IntegerToBrain(codes, sign_flip);
      return kFullDecode ? FusedPair<kWide>(pair, 0x3f803f80u, zero_addend) : pair;
    } else {
      return IntegerToHalf(codes, sign_flip, zero_addend);
    }
  }

  // Some bit of 0x80808080 is set if and only if one of four codes is infinity or NaN.
  JAXFP8_HD static uint32_t SpecialBits(uint32_t codes) {
    // The sum carries from 127 or 255 into and out of the sign bit.
    constexpr uint32_t kToTop = kWeight == DType::kE4M3 ? 0x01010101u : 0x04040404u;
    return codes ^ (codes + kToTop);
  }

  // Bit 7 of a byte is set if its code is NaN; other bits are 0.
  JAXFP8_HD static uint32_t IsNaN(uint32_t codes) {
    static_assert(kWeight == DType::kE4M3);
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  }

 private:
  JAXFP8_HD static uint32_t Float(uint32_t codes) {
    // The 4 or 5 exponent bits become the lowest of the 8 or 5 exponent bits of the wide type.
    constexpr int kMantissa = kWeight == DType::kE4M3 ? 3 : 2;
    constexpr int kShift = (kBrain ? 7 : 10) - kMantissa;
    constexpr uint32_t kFields = ((0x7fu << kShift) & 0x7fffu) | 0x8000u;
    const uint32_t moved = codes << kShift & (kFields | kFields << 16);
    if constexpr (!kBrain) return moved;
    // 2^120 or 2^112; adding -0 keeps the sign of zeros.
    constexpr uint32_t kPower = kWeight == DType::kE4M3 ? 0x7b807b80u : 0x77807780u;
    return FusedPair<kWide>(moved, kPower, 0x80008000u);
  }

  // Signed codes: 128 + (low 7 bits), less 128 or 256 by the sign bit, the lowest bit of the
  // exponent.
  JAXFP8_HD static uint32_t IntegerToBrain(uint32_t codes, uint32_t sign_flip) {
    return FusedPair<kWide>((codes & 0x007f007fu) | 0x43004300u, 0x3f803f80u,
                            (codes & 0x00800080u) ^ (0xc300c300u ^ sign_flip));
  }

  // Unsigned codes: 1024 + code, less 1152 and the zero point.
  JAXFP8_HD static uint32_t IntegerToHalf(uint32_t codes, uint32_t sign_flip,
                                          uint32_t zero_addend) {
    return FusedPair<kWide>((codes & 0x00ff00ffu) ^ (0x64006400u ^ sign_flip), 0x3c003c00u,
                            zero_addend);
  }

  // Puts infinity and NaN in place of the finite numbers they were decoded to.
  JAXFP8_HD static uint32_t RestoreSpecials(uint32_t pair) {
    return RestoreSpecialsLane(pair & 0xffffu) | RestoreSpecialsLane(pair >> 16) << 16;
  }

  // e5m2 to bfloat16: 2^16 stands for infinity, and larger numbers for NaN.
  JAXFP8_HD static uint32_t RestoreSpecialsLane(uint32_t lane) {
    constexpr uint32_t kInfinity = 0x4780u;
    const uint32_t magnitude = lane & 0x7fffu;
    if (magnitude < kInfinity) return lane;
    return magnitude == kInfinity ? (lane & 0x8000u) | 0x7f80u : lane | 0x7fffu;
  }
};

}  // namespace jaxfp8::cuda
