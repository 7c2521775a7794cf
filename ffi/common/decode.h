// Decodes one element from its bits to float32, exactly for every code of every type.

#pragma once

#include <bit>
#include <cstdint>

#include "common/platform.h"

namespace jaxfp8 {

JAXFP8_HD constexpr float FloatFromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
JAXFP8_HD constexpr uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }

// float8_e4m3fn: bias 7, no infinity, NaN is 0x7f and 0xff.
JAXFP8_HD constexpr float DecodeE4M3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return FloatFromBits(sign | 0x7fc00000u);
  if (magnitude >= 8) return FloatFromBits(sign | ((magnitude << 20) + (120u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-9f;
  return FloatFromBits(sign | BitsOf(value));
}

// float8_e5m2: the upper byte of a float16.
JAXFP8_HD constexpr float DecodeE5M2(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7f;
  if (magnitude > 0x7c) return FloatFromBits(sign | 0x7fc00000u);
  if (magnitude == 0x7c) return FloatFromBits(sign | 0x7f800000u);
  if (magnitude >= 4) return FloatFromBits(sign | ((magnitude << 21) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-16f;
  return FloatFromBits(sign | BitsOf(value));
}

JAXFP8_HD constexpr float DecodeBF16(uint16_t code) {
  return FloatFromBits(static_cast<uint32_t>(code) << 16);
}

JAXFP8_HD constexpr float DecodeF16(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000) << 16;
  const uint32_t magnitude = code & 0x7fff;
  if (magnitude >= 0x7c00) return FloatFromBits(sign | 0x7f800000u | ((magnitude & 0x3ff) << 13));
  if (magnitude >= 0x400) return FloatFromBits(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return FloatFromBits(sign | BitsOf(value));
}

// float8_e8m0fnu: 2^(code - 127), the exponent field of float32; 255 is NaN. Without a branch.
JAXFP8_HD constexpr float DecodeE8M0(uint8_t code) {
  const bool ends = code == 0 || code == 255;  // 2^-127, a subnormal, and NaN
  return FloatFromBits(static_cast<uint32_t>(code) << 23 | (ends ? 0x00400000u : 0u));
}

}  // namespace jaxfp8
