// A dense row-major array of one element type, which owns exactly its bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/dtype.h"

namespace jaxfp8::tests {

using Shape = std::vector<int64_t>;

int64_t CountOf(const Shape& shape);

// AddressSanitizer sees who reads or writes past the end: the allocation ends there. The data may
// start `shift` bytes after the allocation begins.
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

  // The same values at a new place.
  Array Copy() const;
  // The last `count` values.
  Array Last(int64_t count) const;

 private:
  DType dtype_ = DType::kNone;
  int64_t count_ = 0, shift_ = 0;
  std::unique_ptr<uint8_t[]> bytes_;
};

// Stores `value` in any element type that holds it.
void Put(const Array& array, int64_t i, double value);
void Fill(const Array& array, double value);
// Stores the codes 0, 1, ... 255, 1, 2, ...: every code in every place of a group of 256. Codes
// that are not finite are left out where `finite` is set.
void FillWithCodes(const Array& array, bool finite);
// Ones where row and column of a square array are equal, else zeros.
void FillWithIdentity(const Array& array, int64_t size);

double ValueOf(const Array& array, int64_t i);

// Equal bits, or NaN in both.
bool SameValues(const Array& a, const Array& b);

}  // namespace jaxfp8::tests
