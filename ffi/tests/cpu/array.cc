#include "tests/cpu/array.h"

#include <cmath>
#include <cstring>

#include "common/decode.h"
#include "common/encode.h"
#include "tests/cpu/formats.h"

namespace jaxfp8::tests {

int64_t CountOf(const Shape& shape) {
  int64_t size = 1;
  for (int64_t axis : shape) size *= axis;
  return size;
}

Array::Array(DType dtype, const Shape& shape, int64_t shift)
    : dtype_(dtype), count_(CountOf(shape)), shift_(shift), bytes_(new uint8_t[shift + bytes()]) {}

Array Array::Copy() const { return Last(count_); }

Array Array::Last(int64_t count) const {
  if (!bytes_) return {};
  Array to(dtype_, {count});
  std::memcpy(to.data(), data() + bytes() - to.bytes(), to.bytes());
  return to;
}

void Put(const Array& array, int64_t i, double value) {
  const auto narrow = static_cast<float>(value);
  switch (array.dtype()) {
    case DType::kF32:
      array.as<float>()[i] = narrow;
      return;
    case DType::kS32:
      array.as<int32_t>()[i] = static_cast<int32_t>(value);
      return;
    case DType::kBF16:
      array.as<uint16_t>()[i] = EncodeBF16(narrow);
      return;
    case DType::kF16:
      array.as<uint16_t>()[i] = EncodeF16(narrow);
      return;
    case DType::kE4M3:
      array.data()[i] = EncodeE4M3(narrow);
      return;
    case DType::kE5M2:
      array.data()[i] = EncodeE5M2(narrow);
      return;
    default:
      array.data()[i] = static_cast<uint8_t>(static_cast<int>(value));
  }
}

void Fill(const Array& array, double value) {
  for (int64_t i = 0; i < array.count(); ++i) Put(array, i, value);
}

void FillWithCodes(const Array& array, bool finite) {
  for (int64_t i = 0; i < array.count(); ++i) {
    const auto code = static_cast<uint8_t>(i + i / 256);
    const bool taken = !finite || std::isfinite(DecodedCode(array.dtype(), code));
    array.data()[i] = taken ? code : 0;
  }
}

void FillWithIdentity(const Array& array, int64_t size) {
  for (int64_t i = 0; i < array.count(); ++i) Put(array, i, i / size == i % size ? 1.0 : 0.0);
}

double ValueOf(const Array& array, int64_t i) {
  switch (array.dtype()) {
    case DType::kF32:
      return array.as<float>()[i];
    case DType::kS32:
      return array.as<int32_t>()[i];
    case DType::kBF16:
      return DecodeBF16(array.as<uint16_t>()[i]);
    case DType::kF16:
      return DecodeF16(array.as<uint16_t>()[i]);
    default:
      return DecodedCode(array.dtype(), array.data()[i]);
  }
}

bool SameValues(const Array& a, const Array& b) {
  if (a.dtype() != b.dtype() || a.count() != b.count()) return false;
  if (a.count() == 0 || std::memcmp(a.data(), b.data(), a.bytes()) == 0) return true;
  for (int64_t i = 0; i < a.count(); ++i) {
    const int64_t size = SizeOf(a.dtype());
    const bool same = std::memcmp(a.data() + i * size, b.data() + i * size, size) == 0;
    if (!same && !(std::isnan(ValueOf(a, i)) && std::isnan(ValueOf(b, i)))) return false;
  }
  return true;
}

}  // namespace jaxfp8::tests
