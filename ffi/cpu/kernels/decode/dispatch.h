// From a type known at run time to a template argument.

#pragma once

#include "common/dtype.h"

namespace jaxfp8::JAXFP8_ISA {

// Calls `f.template operator()<kType>()` for any type of values.
template <typename F>
void WithType(DType type, const F& f) {
  switch (type) {
    case DType::kF32:
      return f.template operator()<DType::kF32>();
    case DType::kBF16:
      return f.template operator()<DType::kBF16>();
    case DType::kF16:
      return f.template operator()<DType::kF16>();
    case DType::kE4M3:
      return f.template operator()<DType::kE4M3>();
    case DType::kE5M2:
      return f.template operator()<DType::kE5M2>();
    case DType::kS8:
      return f.template operator()<DType::kS8>();
    default:
      return f.template operator()<DType::kU8>();
  }
}

// The same for the 8-bit types used by `Policy` without conversion.
template <class Policy, typename F>
void WithByteType(DType type, const F& f) {
  if constexpr (!Policy::kExact) {
    if (type == DType::kE4M3) return f.template operator()<DType::kE4M3>();
    if (type == DType::kE5M2) return f.template operator()<DType::kE5M2>();
  }
  if (type == DType::kS8) return f.template operator()<DType::kS8>();
  return f.template operator()<DType::kU8>();
}

// The same for the types packed by `Policy`.
template <class Policy, typename F>
void WithPackedType(DType type, const F& f) {
  if constexpr (Policy::kExact) {
    WithByteType<Policy>(type, f);
  } else {
    WithType(type, f);
  }
}

}  // namespace jaxfp8::JAXFP8_ISA
