// Rounds FP8 codes and 16-bit values to int8 in registers, to the codes that `jaxfp8.quantize`
// gives for them:
//
//   code = saturate(round(value / step))       float32, ties to even
//
//   4 codes in a word   | c3 | c2 | c1 | c0 |
//     PickBytes         | c1 |  0 |  0 |  0 |     a code on top of a word of its own
//     shift, mask       s 0000 eeee mmm 0...      its fields where float32 has them
//     * 2^120           the value, for subnormals too
//     Quotient          divided as correctly as by a division
//     NearestByte       rounded, in the lowest byte; PickBytes puts four into a word
//
// NaN becomes 0. An infinity saturates: 127, or -128. Runs on the host too, where a test checks all
// codes.

#ifndef JAXFP8_CUDA_KERNELS_SM80_IMMA_REQUANTIZE_CUH_
#define JAXFP8_CUDA_KERNELS_SM80_IMMA_REQUANTIZE_CUH_

#include <cstdint>

#include "cuda/kernels/common/decode16.cuh"
#include "cuda/kernels/common/element.cuh"
#include "cuda/kernels/quantize/quotient.cuh"

namespace jaxfp8::cuda::imma {

// How many words hold four values.
template <DType kType>
inline constexpr int kWordsOfFour = SizeOf(kType);

// Decodes four FP8 codes that are neither infinity nor NaN.
template <DType kType>
JAXFP8_HD void DecodeFinite(uint32_t codes, float (&values)[4]) {
  constexpr int kShift = kType == DType::kE4M3 ? 4 : 3;
  constexpr uint32_t kFields = kType == DType::kE4M3 ? 0x87f00000u : 0x8fe00000u;
  constexpr float kPower = kType == DType::kE4M3 ? 0x1p120f : 0x1p112f;
  for (uint32_t i = 0; i < 4; ++i) {
    const auto top = static_cast<int32_t>(PickBytes(codes, 0, 0x0444u | i << 12));
    values[i] = FloatFromBits(static_cast<uint32_t>(top >> kShift) & kFields) * kPower;
  }
}

// Decodes four values of one line.
template <DType kType>
JAXFP8_HD void DecodeFour(const uint32_t (&words)[kWordsOfFour<kType>], float (&values)[4]) {
  if constexpr (IsFloat8(kType)) {
    if (Decoder<kType, DType::kBF16>::SpecialBits(words[0]) & 0x80808080u) {  // rare
      for (int i = 0; i < 4; ++i) {
        values[i] = Decode<kType>(static_cast<uint8_t>(words[0] >> (8 * i)));
      }
    } else {
      DecodeFinite<kType>(words[0], values);
    }
  } else {
    DecodeWord<kType>(words[0], values);
    DecodeWord<kType>(words[1], values + 2);
  }
}

// The int8 codes of four values of one line, in one word.
template <DType kType>
JAXFP8_HD uint32_t Requantize(const uint32_t (&words)[kWordsOfFour<kType>], const Divisor& step) {
  float values[4];
  DecodeFour<kType>(words, values);
  uint32_t codes[4];
  for (int i = 0; i < 4; ++i) {
    codes[i] = NearestByte(Quotient(values[i], step), -128.0f, 127.0f);
  }
  const uint32_t low = PickBytes(codes[0], codes[1], 0x0040u);
  return PickBytes(low, PickBytes(codes[2], codes[3], 0x0040u), 0x5410u);
}

// The magnitude of a value, as bits, if it counts in the scale of its line; else 0.
JAXFP8_HD uint32_t FiniteMagnitude(float value) {
  const uint32_t bits = BitsOf(value) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

}  // namespace jaxfp8::cuda::imma

#endif  // JAXFP8_CUDA_KERNELS_SM80_IMMA_REQUANTIZE_CUH_
