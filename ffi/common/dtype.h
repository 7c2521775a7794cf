// The element types of the scaled dot, their names and sizes.

#pragma once

#include <cstdint>
#include <string_view>

#include "common/platform.h"

namespace jaxfp8 {

// The types that results are rounded to: V(type, name, type of XLA, type of CUDA). The names
// are those of numpy and ml_dtypes. tests/native/test_lists.py holds them against Python.
#define JAXFP8_ROUNDED_DTYPES(V)              \
  V(F32, "float32", F32, 32F)                 \
  V(BF16, "bfloat16", BF16, 16BF)             \
  V(F16, "float16", F16, 16F)                 \
  V(E4M3, "float8_e4m3fn", F8E4M3FN, 8F_E4M3) \
  V(E5M2, "float8_e5m2", F8E5M2, 8F_E5M2)     \
  V(S8, "int8", S8, 8I)                       \
  V(U8, "uint8", U8, 8U)
// All types: int32 holds sums.
#define JAXFP8_DTYPES(V) JAXFP8_ROUNDED_DTYPES(V) V(S32, "int32", S32, 32I)

#define JAXFP8_ENUMERATOR(type, ...) k##type,
enum class DType : uint8_t { kNone, JAXFP8_DTYPES(JAXFP8_ENUMERATOR) };
#undef JAXFP8_ENUMERATOR

struct DTypeName {
  DType type;
  std::string_view name;
};

#define JAXFP8_ENTRY(type, name, ...) {DType::k##type, name},
inline constexpr DTypeName kDTypeNames[] = {JAXFP8_DTYPES(JAXFP8_ENTRY){DType::kNone, "none"}};
#undef JAXFP8_ENTRY

#define JAXFP8_TEXT(type, name, ...) name ", "
inline constexpr char kDTypeList[] = JAXFP8_ROUNDED_DTYPES(JAXFP8_TEXT) "int32";
#undef JAXFP8_TEXT

inline DType ParseDType(std::string_view name) {
  for (const DTypeName& entry : kDTypeNames) {
    if (entry.name == name) return entry.type;
  }
  return DType::kNone;
}

inline std::string_view NameOf(DType type) {
  for (const DTypeName& entry : kDTypeNames) {
    if (entry.type == type) return entry.name;
  }
  return "none";
}

JAXFP8_HD constexpr int SizeOf(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    default:
      return 1;
  }
}

JAXFP8_HD constexpr bool IsFloat8(DType type) {
  return type == DType::kE4M3 || type == DType::kE5M2;
}

JAXFP8_HD constexpr bool IsInt8(DType type) { return type == DType::kS8 || type == DType::kU8; }

JAXFP8_HD constexpr bool IsEightBit(DType type) { return IsFloat8(type) || IsInt8(type); }

JAXFP8_HD constexpr bool IsWideFloat(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
}

}  // namespace jaxfp8
