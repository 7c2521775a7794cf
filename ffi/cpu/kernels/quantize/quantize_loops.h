// Quantizes a contiguous run of float32, bfloat16 or float16 values, in two loops:
//
//   x -> magnitude bits -> max -> amax
//   x -> / or * scale -> round and saturate -> 32-bit codes -> narrowed to bytes

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/quantize/quantize_kernel.h"

namespace jaxfp8::JAXFP8_ISA {

typedef int16_t S16 __attribute__((vector_size(kBytes)));
typedef uint8_t U8 __attribute__((vector_size(kBytes)));

template <DType kIn>
struct Wide {
  static constexpr bool kIs32 = kIn == DType::kF32;
  using Bits = std::conditional_t<kIs32, int32_t, int16_t>;
  using Vector = std::conditional_t<kIs32, S32, S16>;
  static constexpr Bits kMagnitude = static_cast<Bits>(kIs32 ? 0x7fffffff : 0x7fff);
  static constexpr Bits kInfinity = static_cast<Bits>(kIs32                 ? 0x7f800000
                                                      : kIn == DType::kBF16 ? 0x7f80
                                                                            : 0x7c00);
};

// The bits of the largest magnitude, infinities and NaN included. Bits compare like integers.
template <DType kIn>
inline typename Wide<kIn>::Bits LargestBits(const uint8_t* x, int64_t count) {
  using Bits = typename Wide<kIn>::Bits;
  using Vector = typename Wide<kIn>::Vector;
  constexpr int kValues = sizeof(Vector) / sizeof(Bits);
  Vector largest[2] = {};
  int64_t i = 0;
  for (; i + 2 * kValues <= count; i += 2 * kValues) {
    for (int j = 0; j < 2; ++j) {
      const Vector bits =
          Load<Vector>(x + (i + j * kValues) * sizeof(Bits)) & Wide<kIn>::kMagnitude;
      largest[j] = bits > largest[j] ? bits : largest[j];
    }
  }
  Bits result = 0;
  for (const Vector& half : largest) {
    for (int j = 0; j < kValues; ++j) result = std::max<Bits>(result, half[j]);
  }
  for (; i < count; ++i) {
    const Bits bits = Load<Bits>(x + i * sizeof(Bits)) & Wide<kIn>::kMagnitude;
    result = std::max(result, bits);
  }
  return result;
}

// The same of finite values alone. Reads a run again only if it has other values, a rare case.
template <DType kIn>
inline typename Wide<kIn>::Bits LargestFiniteBits(const uint8_t* x, int64_t count) {
  using Bits = typename Wide<kIn>::Bits;
  Bits result = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = Load<Bits>(x + i * sizeof(Bits)) & Wide<kIn>::kMagnitude;
    if (bits < Wide<kIn>::kInfinity) result = std::max(result, bits);
  }
  return result;
}

template <DType kIn>
inline float Magnitude(typename Wide<kIn>::Bits bits) {
  uint8_t bytes[sizeof bits];
  Store(bytes, bits);
  return DecodeOne<kIn>(bytes);
}

template <DType kIn>
uint32_t MagnitudeOfRun(const uint8_t* x, int64_t count) {
  return BitsOf(Magnitude<kIn>(LargestBits<kIn>(x, count)));
}

template <DType kIn>
float LargestOfRun(const uint8_t* x, int64_t count) {
  typename Wide<kIn>::Bits bits = LargestBits<kIn>(x, count);
  if (bits >= Wide<kIn>::kInfinity) bits = LargestFiniteBits<kIn>(x, count);
  return Magnitude<kIn>(bits);
}

// kLanes values as float32.
template <DType kIn>
inline F32 WideVector(const uint8_t* from) {
#if defined(__AVX2__)
  return DecodeVector<kIn>(from);
#else
  F32 values;
  for (int i = 0; i < kLanes; ++i) values[i] = DecodeOne<kIn>(from + i * SizeOf(kIn));
  return values;
#endif
}

inline S32 BitsOfVector(F32 values) { return reinterpret_cast<S32>(values); }

// An FP8 dtype: its mantissa bits, the float32 exponent of its smallest normal number, and its
// largest finite number.
struct Float8 {
  int mantissa;
  int32_t least, highest;
  int32_t nan;
};
template <DType kOut>
inline constexpr Float8 kFloat8 = kOut == DType::kE4M3 ? Float8{3, 0x3c800000, 0x43e00000, 0x7f}
                                                       : Float8{2, 0x38800000, 0x47600000, 0x7e};

// Rounds to nearest even by an addition: 2^(23 - mantissa bits) times the power of two below the
// magnitude leaves the rounded mantissa, leading 1 included, in the low bits. Subnormal codes share
// the power of the smallest normal number.
template <DType kOut>
inline S32 Float8Codes(F32 values) {
  constexpr Float8 kType = kFloat8<kOut>;
  constexpr int kShift = 23 - kType.mantissa;
  const S32 bits = BitsOfVector(values), all = bits & 0x7fffffff;
  const S32 limit = S32{} + kType.highest, least = S32{} + kType.least;
  const S32 magnitude = all < limit ? all : limit;
  const S32 power = magnitude & 0x7f800000;
  const S32 base = power > least ? power : least;
  const S32 shifted = base + (kShift << 23);
  const F32 sum = reinterpret_cast<F32>(magnitude) + reinterpret_cast<F32>(shifted);
  const S32 code = ((base - kType.least) >> kShift) + (BitsOfVector(sum) - shifted);
  const S32 nan = S32{} + kType.nan;
  return (all > 0x7f800000 ? nan : code) | ((bits >> 24) & 0x80);
}

// Adding 1.5 * 2^23 leaves the nearest integer in the low bits. NaN becomes 0.
inline S32 IntegerCodes(F32 values, F32 lowest) {
  const F32 high = F32{} + 127.0f;
  const F32 known = values == values ? values : F32{};
  const F32 raised = known > lowest ? known : lowest;
  const F32 clipped = raised < high ? raised : high;
  return BitsOfVector(clipped + 0x1.8p23f) & 0xff;
}

template <DType kIn, DType kOut, bool kMultiplies>
inline S32 CodesOf(const uint8_t* x, F32 scale, F32 lowest) {
  const F32 values = WideVector<kIn>(x);
  const F32 steps = kMultiplies ? values * scale : values / scale;
  if constexpr (kOut == DType::kS8) {
    return IntegerCodes(steps, lowest);
  } else {
    return Float8Codes<kOut>(steps);
  }
}

// The values of one step: four vectors of 32-bit codes fill one vector of bytes.
#if defined(__AVX512F__)

inline constexpr int kBlock = kLanes;

template <DType kIn, DType kOut, bool kMultiplies>
inline void EncodeBlock(const uint8_t* x, F32 scale, F32 lowest, uint8_t* codes) {
  const S32 wide = CodesOf<kIn, kOut, kMultiplies>(x, scale, lowest);
  Store(codes, _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(wide)));
}

#else

inline constexpr int kBlock = kBytes;

template <typename Half, int... kLane>
inline Half EvenOf(Half low, Half high, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(low, high, 2 * kLane...);
}

// The lower halves of the elements of two vectors, in order.
template <typename Half, typename Vector>
inline Half Narrow(Vector low, Vector high) {
  constexpr int kHalves = sizeof(Half) / sizeof(Half{}[0]);
  return EvenOf(reinterpret_cast<Half>(low), reinterpret_cast<Half>(high),
                std::make_integer_sequence<int, kHalves>());
}

template <DType kIn, DType kOut, bool kMultiplies>
inline void EncodeBlock(const uint8_t* x, F32 scale, F32 lowest, uint8_t* codes) {
  constexpr int kStep = kLanes * SizeOf(kIn);
  S32 wide[4];
  for (int i = 0; i < 4; ++i) {
    wide[i] = CodesOf<kIn, kOut, kMultiplies>(x + i * kStep, scale, lowest);
  }
  Store(codes, Narrow<U8>(Narrow<S16>(wide[0], wide[1]), Narrow<S16>(wide[2], wide[3])));
}

#endif

template <DType kIn, DType kOut, bool kMultiplies>
void EncodeBy(const uint8_t* x, int64_t count, float scale, float lowest, uint8_t* codes) {
  constexpr int kSize = SizeOf(kIn);
  // `F32{} + scale` would turn a scale of -0 into 0.
  const F32 scales = scale - F32{}, lows = F32{} + lowest;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    EncodeBlock<kIn, kOut, kMultiplies>(x + i * kSize, scales, lows, codes + i);
  }
  if (i == count) return;
  uint8_t last[kBlock * kSize] = {}, some[kBlock];
  std::memcpy(last, x + i * kSize, (count - i) * kSize);
  EncodeBlock<kIn, kOut, kMultiplies>(last, scales, lows, some);
  std::memcpy(codes + i, some, count - i);
}

template <DType kIn, DType kOut>
void EncodeRun(const uint8_t* x, int64_t count, float scale, bool multiplies, float lowest,
               uint8_t* codes) {
  if (multiplies) {
    EncodeBy<kIn, kOut, true>(x, count, scale, lowest, codes);
  } else {
    EncodeBy<kIn, kOut, false>(x, count, scale, lowest, codes);
  }
}

template <DType kIn>
QuantizeKernel KernelFrom(DType out) {
  constexpr auto largest = LargestOfRun<kIn>;
  constexpr auto magnitude = MagnitudeOfRun<kIn>;
  switch (out) {
    case DType::kE4M3:
      return {largest, magnitude, EncodeRun<kIn, DType::kE4M3>};
    case DType::kE5M2:
      return {largest, magnitude, EncodeRun<kIn, DType::kE5M2>};
    default:
      return {largest, magnitude, EncodeRun<kIn, DType::kS8>};
  }
}

QuantizeKernel QuantizeKernelOf(DType in, DType out) {
  switch (in) {
    case DType::kF32:
      return KernelFrom<DType::kF32>(out);
    case DType::kBF16:
      return KernelFrom<DType::kBF16>(out);
    default:
      return KernelFrom<DType::kF16>(out);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA
