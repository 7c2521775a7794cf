// A scaled dot of the C interface, with operands and results that own exactly their bytes.

#ifndef JAXFP8_TESTS_CPU_CASE_H_
#define JAXFP8_TESTS_CPU_CASE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "include/jaxfp8/jaxfp8.h"

namespace jaxfp8::tests {

using Shape = std::vector<int64_t>;
using Random = std::mt19937_64;

int64_t CountOf(const Shape& shape);

// Bytes that end where their allocation ends, and may start `shift` bytes after it begins: whoever
// reads or writes past the end is seen by AddressSanitizer.
class Array {
 public:
  Array() = default;
  Array(DType dtype, const Shape& shape, int64_t shift = 0);

  uint8_t* data() const { return bytes_ ? bytes_.get() + shift_ : nullptr; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * SizeOf(dtype_); }
  DType dtype() const { return dtype_; }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

 private:
  DType dtype_ = DType::kNone;
  int64_t count_ = 0, shift_ = 0;
  std::unique_ptr<uint8_t[]> bytes_;
};

struct SideCase {
  DType dtype = DType::kE4M3;
  Shape shape, contracting, batch, tiles;
  bool scale = false, zero_point = false;
  DType scale_type = DType::kF32, zero_type = DType::kS32;

  Shape ScaleShape() const;
  Shape Free() const;  // axes
};

struct Case {
  SideCase lhs, rhs;
  std::optional<Shape> residual, bias, out_scale, amax;
  DType residual_dtype = DType::kF32, bias_dtype = DType::kF32;
  std::string activation = "none";
  DType out_dtype = DType::kF32;

  Shape OutShape() const;
  std::string Text() const;
};

struct Operands {
  Array lhs, rhs, lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point, residual, bias, out_scale;
};

struct Results {
  Array out, amax;
};

// What the values of the sides are drawn from.
enum class Values {
  kFinite,   // any finite code; wide types about 1
  kSpecial,  // now and then NaN and infinity too
};

Operands DrawOperands(const Case& from, Values values, Random& random);

// Fills an 8-bit array with all codes in turn, or with those that are finite.
void FillWithCodes(const Array& array, bool finite);

// Stores `value` in any element type that holds it.
void Put(const Array& array, int64_t i, double value);

// Results full of bytes that no kernel leaves behind.
Results SoiledResults(const Case& from);

// Calls jaxfp8_cpu_scaled_dot, or what is behind it where a scale, a zero point or the bias has a
// dtype that only XLA's call takes; returns its status.
int Call(const Case& from, const Operands& operands, const Results& results, const char* kernel,
         int threads, std::string& message);

}  // namespace jaxfp8::tests

#endif  // JAXFP8_TESTS_CPU_CASE_H_
