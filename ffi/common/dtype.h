// The element types of the scaled dot, their names and sizes.

#ifndef JAXFP8_COMMON_DTYPE_H_
#define JAXFP8_COMMON_DTYPE_H_

#include <cstdint>
#include <string_view>

#include "common/platform.h"

namespace jaxfp8 {

enum class DType : uint8_t { kNone, kF32, kBF16, kF16, kE4M3, kE5M2, kS8, kU8, kS32 };

struct DTypeName {
  DType type;
  std::string_view name;
};

// The names are those of numpy and ml_dtypes.
inline constexpr DTypeName kDTypeNames[] = {
    {DType::kF32, "float32"},        {DType::kBF16, "bfloat16"},    {DType::kF16, "float16"},
    {DType::kE4M3, "float8_e4m3fn"}, {DType::kE5M2, "float8_e5m2"}, {DType::kS8, "int8"},
    {DType::kU8, "uint8"},           {DType::kS32, "int32"},        {DType::kNone, "none"},
};

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

#endif  // JAXFP8_COMMON_DTYPE_H_
