// Encodes one result to the bits of the output type with one rounding, to nearest even. A float64
// is first rounded to float32 by RoundToOdd, which makes the second rounding correct.
//
// Wide types overflow to infinity, 8-bit types saturate. NaN stays NaN, and becomes 0 in integers.
// No branch depends on the value, so that loops vectorise.

#pragma once

#include <bit>
#include <cstdint>

#include "common/decode.h"
#include "common/platform.h"

namespace jaxfp8 {

// Rounds to float32 so that a second rounding, to a type of at most 22 bits of precision, gives
// what one rounding from float64 would. An inexact result becomes the neighbour whose last bit
// is 1.
JAXFP8_HD float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const uint32_t bits = BitsOf(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double reached = back < 0 ? -back : back;
  const uint32_t truncated = bits - (reached > magnitude ? 1u : 0u);
  return FloatFromBits(back == value ? bits : (truncated | 1u));
}

JAXFP8_HD uint16_t EncodeBF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(value != value ? nan : rounded);
}

JAXFP8_HD uint16_t EncodeF16(float value) {
  const uint32_t sign = (BitsOf(value) >> 16) & 0x8000u;
  const uint32_t bits = BitsOf(value) & 0x7fffffffu;
  const float magnitude = FloatFromBits(bits);
  const uint32_t normal = ((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13) - (112u << 10);
  const uint32_t subnormal = BitsOf(magnitude + 0.5f) - BitsOf(0.5f);
  uint32_t out = magnitude < 0x1p-14f ? subnormal : normal;
  out = magnitude >= 65520.0f ? 0x7c00u : out;
  out = value != value ? 0x7e00u : out;
  return static_cast<uint16_t>(sign | out);
}

JAXFP8_HD uint8_t EncodeE4M3(float value) {
  const uint32_t sign = (BitsOf(value) >> 24) & 0x80u;
  const uint32_t bits = BitsOf(value) & 0x7fffffffu;
  const float magnitude = FloatFromBits(bits);
  const uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t subnormal = BitsOf(magnitude + 0x1p14f) - BitsOf(0x1p14f);
  uint32_t out = magnitude < 0x1p-6f ? subnormal : normal;
  out = magnitude >= 448.0f ? 0x7eu : out;
  out = value != value ? 0x7fu : out;
  return static_cast<uint8_t>(sign | out);
}

JAXFP8_HD uint8_t EncodeE5M2(float value) {
  const uint32_t sign = (BitsOf(value) >> 24) & 0x80u;
  const uint32_t bits = BitsOf(value) & 0x7fffffffu;
  const float magnitude = FloatFromBits(bits);
  const uint32_t normal = ((bits + 0xfffffu + ((bits >> 21) & 1u)) >> 21) - (112u << 2);
  const uint32_t subnormal = BitsOf(magnitude + 0x1p7f) - BitsOf(0x1p7f);
  uint32_t out = magnitude < 0x1p-14f ? subnormal : normal;
  out = magnitude >= 57344.0f ? 0x7bu : out;
  out = value != value ? 0x7eu : out;
  return static_cast<uint8_t>(sign | out);
}

// Rounds to the nearest integer within [low, high]; NaN gives 0.
JAXFP8_HD int32_t EncodeInteger(float value, float low, float high) {
  const float known = value != value ? 0.0f : value;
  const float raised = known < low ? low : known;
  const float clipped = raised > high ? high : raised;
  constexpr float kToInteger = 0x1.8p23f;
  return static_cast<int32_t>((clipped + kToInteger) - kToInteger);
}

JAXFP8_HD int8_t EncodeS8(float value) {
  return static_cast<int8_t>(EncodeInteger(value, -128.0f, 127.0f));
}

JAXFP8_HD uint8_t EncodeU8(float value) {
  return static_cast<uint8_t>(EncodeInteger(value, 0.0f, 255.0f));
}

// An integer sum of less than 2^53, modulo 2^32 like every int32 sum.
JAXFP8_HD int32_t EncodeS32(double value) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<int64_t>(value)));
}

}  // namespace jaxfp8
