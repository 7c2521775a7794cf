// Converts single elements and words of elements to float32 and back, with the GPU's own
// conversions if it has them.
//
// Host and device give the same bits, except for the sign of NaN: the host tests of
// ffi/common/{decode,encode}.h hold for both.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/decode.h"
#include "common/dtype.h"
#include "common/encode.h"

namespace jaxfp8::cuda {

// The unsigned integer for the bits of one element.
template <DType kType>
using Bits = std::conditional_t<SizeOf(kType) == 4, uint32_t,
                                std::conditional_t<SizeOf(kType) == 2, uint16_t, uint8_t>>;

template <DType kType>
JAXFP8_HD float Decode(Bits<kType> bits) {
  if constexpr (kType == DType::kF32) return FloatFromBits(bits);
  if constexpr (kType == DType::kBF16) return DecodeBF16(bits);
  if constexpr (kType == DType::kF16) return DecodeF16(bits);
  if constexpr (kType == DType::kE4M3) return DecodeE4M3(bits);
  if constexpr (kType == DType::kE5M2) return DecodeE5M2(bits);
  if constexpr (kType == DType::kS8) return static_cast<float>(static_cast<int8_t>(bits));
  if constexpr (kType == DType::kU8) return static_cast<float>(bits);
  if constexpr (kType == DType::kS32) return static_cast<float>(static_cast<int32_t>(bits));
}

// The bits of the nearest integer within [low, high], ties to even, NaN as 0, in the low byte.
// Adding 1.5 * 2^23 leaves the integer in the low bits.
JAXFP8_HD uint32_t NearestByte(float value, float low, float high) {
  const float known = value != value ? 0.0f : value;
  return BitsOf(fminf(fmaxf(known, low), high) + 0x1.8p23f);
}

template <DType kType>
JAXFP8_HD Bits<kType> Encode(float value) {
  if constexpr (kType == DType::kF32) {
    return BitsOf(value);
  } else if constexpr (kType == DType::kBF16) {
    return EncodeBF16(value);
  } else if constexpr (kType == DType::kF16) {
    return EncodeF16(value);
  } else if constexpr (kType == DType::kE4M3) {
    return EncodeE4M3(value);
  } else if constexpr (kType == DType::kE5M2) {
    return EncodeE5M2(value);
  } else if constexpr (kType == DType::kS8) {
    return static_cast<uint8_t>(NearestByte(value, -128.0f, 127.0f));
  } else {
    static_assert(kType == DType::kU8);
    return static_cast<uint8_t>(NearestByte(value, 0.0f, 255.0f));
  }
}

// The e4m3 or e5m2 codes of two floats, the first in the low byte.
template <DType kType>
JAXFP8_HD uint32_t EncodeFloat8Pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (kType == DType::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return Encode<kType>(first) | static_cast<uint32_t>(Encode<kType>(second)) << 8;
#endif
}

template <DType kType>
JAXFP8_HD uint32_t EncodeFloat16Pair(float first, float second) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  if constexpr (kType == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return Encode<kType>(first) | static_cast<uint32_t>(Encode<kType>(second)) << 16;
#endif
}

// How many elements of a type a 32-bit word holds.
template <DType kType>
inline constexpr int kPerWord = 4 / SizeOf(kType);

// Encodes floats into one word, the first in the low bits.
template <DType kType>
JAXFP8_HD uint32_t EncodeWord(const float* values) {
  if constexpr (SizeOf(kType) == 4) {
    return Encode<kType>(values[0]);
  } else if constexpr (SizeOf(kType) == 2) {
    return EncodeFloat16Pair<kType>(values[0], values[1]);
  } else if constexpr (IsFloat8(kType)) {
    return EncodeFloat8Pair<kType>(values[0], values[1]) |
           EncodeFloat8Pair<kType>(values[2], values[3]) << 16;
  } else {
    return Encode<kType>(values[0]) | static_cast<uint32_t>(Encode<kType>(values[1])) << 8 |
           static_cast<uint32_t>(Encode<kType>(values[2])) << 16 |
           static_cast<uint32_t>(Encode<kType>(values[3])) << 24;
  }
}

// The two codes in the low 16 bits as float16. Every FP8 value is exact in it.
template <DType kType>
JAXFP8_HD uint32_t HalvesOfFloat8Pair(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  const uint16_t pair = static_cast<uint16_t>(codes);
  if constexpr (kType == DType::kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  }
  return halves;
#else
  return EncodeFloat16Pair<DType::kF16>(Decode<kType>(static_cast<uint8_t>(codes)),
                                        Decode<kType>(static_cast<uint8_t>(codes >> 8)));
#endif
}

// Decodes the two codes in the low 16 bits.
template <DType kType>
JAXFP8_HD void DecodeFloat8Pair(uint32_t codes, float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint32_t halves = HalvesOfFloat8Pair<kType>(codes);
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(halves));
#else
  values[0] = Decode<kType>(static_cast<uint8_t>(codes));
  values[1] = Decode<kType>(static_cast<uint8_t>(codes >> 8));
#endif
}

template <DType kType>
JAXFP8_HD float DecodeFloat16(uint32_t bits) {
#ifdef __CUDA_ARCH__
  if constexpr (kType == DType::kF16) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
  }
#endif
  return Decode<kType>(static_cast<uint16_t>(bits));
}

// Decodes the elements of one word.
template <DType kType>
JAXFP8_HD void DecodeWord(uint32_t word, float* values) {
  if constexpr (SizeOf(kType) == 4) {
    values[0] = Decode<kType>(word);
  } else if constexpr (SizeOf(kType) == 2) {
    values[0] = DecodeFloat16<kType>(word & 0xffffu);
    values[1] = DecodeFloat16<kType>(word >> 16);
  } else if constexpr (IsFloat8(kType)) {
    DecodeFloat8Pair<kType>(word & 0xffffu, values);
    DecodeFloat8Pair<kType>(word >> 16, values + 2);
  } else {
    for (int i = 0; i < 4; ++i) values[i] = Decode<kType>(static_cast<uint8_t>(word >> (8 * i)));
  }
}

// Calls `f.template operator()<value>()` for a value known at run time, such as a dtype, and
// returns its result, or `otherwise` for an unlisted value.
template <auto... kValues, typename Value, typename Result, typename F>
Result Visit(Value value, Result otherwise, F&& f) {
  Result result = otherwise;
  (void)((value == kValues && (result = f.template operator()<kValues>(), true)) || ...);
  return result;
}

#ifdef __CUDACC__

// The same in device code, for any dtype of values.
template <typename F>
__device__ __forceinline__ void WithType(DType type, F&& run) {
  switch (type) {
    case DType::kF32:
      return run.template operator()<DType::kF32>();
    case DType::kBF16:
      return run.template operator()<DType::kBF16>();
    case DType::kF16:
      return run.template operator()<DType::kF16>();
    case DType::kE4M3:
      return run.template operator()<DType::kE4M3>();
    case DType::kE5M2:
      return run.template operator()<DType::kE5M2>();
    case DType::kS8:
      return run.template operator()<DType::kS8>();
    default:
      return run.template operator()<DType::kU8>();
  }
}

#endif  // __CUDACC__

}  // namespace jaxfp8::cuda
