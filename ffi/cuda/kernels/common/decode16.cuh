// 8-bit weights to pairs of bfloat16 or float16 in registers, exactly for every code.
//
// A pair begins as two codes in the 16-bit lanes of a word, each with copies of its sign bit above
// it: one instruction (`PickBytes`) brings any two codes into that form.
//   FP8      The fields move into the place of the wide type's, whose exponent bias is larger: the
//            pair is the value times a power of two. For float16 that power is left to the scale
//            (float16 products of subnormals are exact); for bfloat16 it is 2^-120, which would
//            sink sums below float32, so an exact multiplication takes it away. Only infinity and
//            NaN are not right then. They are rare: `Unusual` finds them four at a time, and only
//            then does anything pay for them: NaN of e4m3 spoils its whole column, which needs no
//            place (`IsNaN`); e5m2 as bfloat16 is decoded again with `Mend`; as float16 it is the
//            upper byte of one, and nothing is wrong.
//   integer  The bits enter the mantissa of a power of two, which an exact subtraction takes away.
//            The code less its zero point is within [-255, 255], which both types hold exactly,
//            as long as the zero point is a value of the code's type (see `ZeroPoint`).
// Everything runs on the host too, so that a test can look at all codes there.

#ifndef JAXFP8_CUDA_KERNELS_COMMON_DECODE16_CUH_
#define JAXFP8_CUDA_KERNELS_COMMON_DECODE16_CUH_

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

// a * b + c in each lane, rounded once. Subnormals count in full: PTX flushes none here.
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

// Bytes of (low, high), numbered 0 to 7, by the nibbles of `selector`; 8 more asks for eight copies
// of the byte's top bit.
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

// A zero point as the kernel uses it. One outside the code's type is taken at the type's border and
// the rest, `excess`, multiplies the sum of the activations afterwards. Both parts have the same
// sign for every code then, so that splitting costs no precision: |q - z| = |q - border| +
// |excess|.
struct ZeroPoint {
  int32_t border;
  float excess;
};

JAXFP8_HD ZeroPoint SplitZeroPoint(DType weight, int32_t zero_point) {
  const int32_t low = weight == DType::kS8 ? -128 : 0, high = low + 255;
  const int32_t raised = zero_point < low ? low : zero_point;
  const int32_t border = raised > high ? high : raised;
  // In 64 bits: the difference of two int32 may not fit one.
  return {border, static_cast<float>(static_cast<int64_t>(zero_point) - border)};
}

template <DType kWeight, DType kWide>
struct Decoder {
  static_assert(kWeight == DType::kS8 || IsFloat8(kWeight));  // uint8 is int8 after `FlipOf`
  static_assert(kWide == DType::kBF16 || kWide == DType::kF16);
  static constexpr bool kInteger = kWeight == DType::kS8;
  static constexpr bool kBrain = kWide == DType::kBF16;
  // How infinity and NaN are made right.
  static constexpr bool kPoisons = kWeight == DType::kE4M3;
  static constexpr bool kMends = kWeight == DType::kE5M2 && kBrain;
  // Whether subtracting a zero point takes an instruction of its own.
  static constexpr bool kSubtracts = kInteger && kBrain;

  // A decoded value times this is the value.
  static constexpr float kFactor = kWeight == DType::kE4M3 && !kBrain ? 256.0f : 1.0f;

  // What turns the codes of one integer type into those of the other, which is decoded.
  JAXFP8_HD static uint32_t FlipOf(DType weight) {
    return kInteger && (weight == DType::kU8) == kBrain ? 0x00800080u : 0;
  }

  // What `Decode` adds to both codes of a pair to subtract their zero point, a value of the type.
  JAXFP8_HD static uint32_t LessOf(DType weight, int32_t zero_point) {
    const int32_t centred = weight == DType::kU8 ? zero_point - 128 : zero_point;
    return BothLanes<kWide>(static_cast<float>(kBrain ? -centred : -1152 - centred));
  }

  // A pair from two codes with their signs above them. `kCareful`: there may be zero points, or
  // infinity and NaN to be mended.
  template <bool kCareful>
  JAXFP8_HD static uint32_t Decode(uint32_t codes, uint32_t flip, uint32_t less) {
    if constexpr (!kInteger) {
      return kCareful && kMends ? Mend(Float(codes)) : Float(codes);
    } else if constexpr (kBrain) {
      const uint32_t pair = IntegerToBrain(codes, flip);
      return kCareful ? FusedPair<kWide>(pair, 0x3f803f80u, less) : pair;
    } else {
      return IntegerToHalf(codes, flip, less);
    }
  }

  // Some bit of 0x80808080 is set if some of four codes are infinity or NaN, and only then.
  JAXFP8_HD static uint32_t Unusual(uint32_t codes) {
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
    // The exponent's place: 4 or 5 bits of a byte become the lowest of the 8 or 5 of the wide type.
    constexpr int kMantissa = kWeight == DType::kE4M3 ? 3 : 2;
    constexpr int kShift = (kBrain ? 7 : 10) - kMantissa;
    constexpr uint32_t kFields = ((0x7fu << kShift) & 0x7fffu) | 0x8000u;
    const uint32_t moved = codes << kShift & (kFields | kFields << 16);
    if constexpr (!kBrain) return moved;
    // 2^120 or 2^112; adding -0 keeps the sign of zeros.
    constexpr uint32_t kPower = kWeight == DType::kE4M3 ? 0x7b807b80u : 0x77807780u;
    return FusedPair<kWide>(moved, kPower, 0x80008000u);
  }

  // Signed codes: 128 + (low 7 bits), less 128 or 256 by the sign bit, which is the lowest bit of
  // the exponent.
  JAXFP8_HD static uint32_t IntegerToBrain(uint32_t codes, uint32_t flip) {
    return FusedPair<kWide>((codes & 0x007f007fu) | 0x43004300u, 0x3f803f80u,
                            (codes & 0x00800080u) ^ (0xc300c300u ^ flip));
  }

  // Unsigned codes: 1024 + code, less 1152 and the zero point.
  JAXFP8_HD static uint32_t IntegerToHalf(uint32_t codes, uint32_t flip, uint32_t less) {
    return FusedPair<kWide>((codes & 0x00ff00ffu) ^ (0x64006400u ^ flip), 0x3c003c00u, less);
  }

  // A decoded pair with infinity and NaN put in the place of the numbers they were taken for.
  JAXFP8_HD static uint32_t Mend(uint32_t pair) {
    return MendLane(pair & 0xffffu) | MendLane(pair >> 16) << 16;
  }

  // e5m2 as bfloat16: 2^16 is infinity, and what is above it is NaN.
  JAXFP8_HD static uint32_t MendLane(uint32_t lane) {
    constexpr uint32_t kTaken = 0x4780u;
    const uint32_t magnitude = lane & 0x7fffu;
    if (magnitude < kTaken) return lane;
    return magnitude == kTaken ? (lane & 0x8000u) | 0x7f80u : lane | 0x7fffu;
  }
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_COMMON_DECODE16_CUH_
